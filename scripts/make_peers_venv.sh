#!/usr/bin/env bash
# Make or update the virtual environment of the engines we are measured against, given as the first argument; `make
# venv-peers` calls this. They need another transformers than ours, so nothing of ours is installed there.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: make_peers_venv.sh FOLDER}

if [ ! -x "$venv/bin/python" ]; then
  .venv/bin/python -m venv --clear "$venv"
fi
install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --quiet "$@"
}
echo "installing torch (1/2)"
# shellcheck disable=SC2086  # several words on purpose
install ${TORCH_INDEX_ARGS:-} -c constraints.txt torch
echo "installing the peers (2/2)"
install -r experiments/peers/requirements.txt
echo "$venv is ready"
