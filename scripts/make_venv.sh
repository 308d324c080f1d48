#!/usr/bin/env bash
# Make or update the virtual environment given as the first argument; `make venv` calls this.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: make_venv.sh FOLDER}

fits() { # a stand-in on PATH may exist and yet not run, so ask it
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() {
  local candidate
  for candidate in python3.11 python3.12 python3 python; do
    if command -v "$candidate" >/dev/null && fits "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "turnout needs Python 3.11 or 3.12 with the venv module, and found neither on PATH as python3.11," \
    "python3.12, python3 or python" >&2
  return 1
}

install() { # the whole of pip's output goes to a log; what shows progress, to the terminal
  if ! "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt "$@" 2>&1 |
    tee -a "$log" | { grep --line-buffered -E '^ *(Downloading|Building|Installing|ERROR)' || true; } | cut -c1-100; then
    tail -n 25 "$log" >&2
    echo "installing failed; the whole output is in $log" >&2
    return 1
  fi
}

if [ ! -x "$venv/bin/python" ] || ! fits "$venv/bin/python"; then
  python=$(find_python)
  echo "making $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
fi
started=$SECONDS
log=$venv/install.log
: >"$log"
echo "installing torch (1/2)"
# shellcheck disable=SC2086  # several words on purpose
install ${TORCH_INDEX_ARGS:-} torch
echo "installing Turnout and what it needs (2/2)"
install hatchling editables
install --no-build-isolation -e '.[dev]'
"$venv/bin/python" -m engine.backends.native # compiled now, so that no first start has to wait for it
echo "$venv is ready ($((SECONDS - started)) s)"
