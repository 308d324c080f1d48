#!/usr/bin/env bash
# Fetch the JSON Schema Test Suite into the folder given as the first argument; `make bench-schemas` calls this. It is in
# the sources of the package jsonschema (370 kB), under the licence of the suite (MIT).
set -euo pipefail
pip=${2:?usage: fetch_schema_tests.sh FOLDER PIP}
[ -d "$1/tests" ] && exit
rm -rf "$1.part"
mkdir -p "$1.part"
echo "jsonschema==4.26.0 --hash=sha256:0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326" >"$1.part/wanted"
"$pip" download --quiet --disable-pip-version-check --no-deps --no-binary jsonschema --require-hashes \
  --requirement "$1.part/wanted" --dest "$1.part"
tar -xzf "$1.part"/jsonschema-*.tar.gz -C "$1.part" --strip-components=2 --wildcards '*/json/tests/*' '*/json/LICENSE'
rm "$1.part/wanted" "$1.part"/*.tar.gz
rm -rf "$1"
mv "$1.part" "$1"
