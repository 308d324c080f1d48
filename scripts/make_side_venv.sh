#!/usr/bin/env bash
# Make or update a second virtual environment, for programs that need other versions than ours: its folder is the
# first argument, their requirements file the second. Nothing of ours is installed there. `make venv-peers`,
# `make venv-vllm` and `make venv-foreign` call this.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: make_side_venv.sh FOLDER REQUIREMENTS}
requirements=${2:?usage: make_side_venv.sh FOLDER REQUIREMENTS}

if [ ! -x "$venv/bin/python" ]; then
  .venv/bin/python -m venv --clear "$venv"
fi
install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --quiet "$@"
}
echo "installing torch (1/2)"
# shellcheck disable=SC2086  # several words on purpose
install ${TORCH_INDEX_ARGS:-} -c constraints.txt torch
echo "installing what $requirements asks for (2/2)"
install -r "$requirements"
echo "$venv is ready"
