#!/usr/bin/env bash
# Set up what is missing and run the tests.
#   ./run_tests.sh [flags of pytest]
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$HERE/launcher_common.sh"

use_python "$HERE/requirements.txt" "$HERE/requirements-dev.txt"
cd "$HERE" || exit 1
"$PYTHON" -m ruff check . && "$PYTHON" -m ruff format --check . || exit 1
exec "$PYTHON" -m pytest -n "${PYTEST_WORKERS:-2}" "$@"
