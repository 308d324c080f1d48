#!/usr/bin/env bash
# Install programs that some tests drive, by the names Debian gives their packages and the programs in them. Where that
# cannot be done it says so and continues: the tests that need them are then left out, and name what is missing.
set -uo pipefail

missing=()
for name in "$@"; do
  command -v "$name" >/dev/null || missing+=("$name")
done
[ "${#missing[@]}" -eq 0 ] && exit 0
if ! command -v apt-get >/dev/null; then
  echo "not installed, as there is no apt-get: ${missing[*]}" >&2
elif [ "$(id -u)" -ne 0 ]; then
  echo "not installed, as this is not root: ${missing[*]}" >&2
elif ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >/dev/null; then
  echo "not installed, as apt-get failed: ${missing[*]}" >&2
fi
exit 0
