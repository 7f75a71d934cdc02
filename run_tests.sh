#!/usr/bin/env bash
# Set up what is missing and run the tests.
#   ./run_tests.sh [flags of pytest]
set -u
HERE=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd) || exit 1
. "$HERE/launcher_common.sh" || exit 1

use_python "$HERE/requirements.txt" "$HERE/requirements-dev.txt"
cd "$HERE" || exit 1
"$PYTHON" -m ruff check . && "$PYTHON" -m ruff format --check . || exit 1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the workers share the cores
exec "$PYTHON" -m pytest -n "${PYTEST_WORKERS:-2}" --dist worksteal "$@" # some tests take minutes, most none
