#!/usr/bin/env bash
# Set up what is missing and run the tests.
#   ./run_tests.sh [flags of pytest]
#   ./run_tests.sh --fast [flags of pytest]     without the slow ones: every module, in four to five minutes on two cores
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/launcher_common.sh" || exit 1

# shellcheck disable=SC2034 # read by use_python: without the GPU, its tests are skipped
DEVICE=cpu
use_python "$HERE/requirements.txt" "$HERE/requirements-dev.txt"
# In Triton's interpreter the kernels are tested where there is no GPU.
if [ "$PYTHON" = "$VENV/bin/python" ] && ! "$PYTHON" -c 'import triton' 2>/dev/null; then
    pip_install "$PYTHON" "$TRITON" || echo "Triton cannot be installed here: tests of kernels/ are skipped" >&2
fi
cd "$HERE" || exit 1
"$PYTHON" -m ruff check . && "$PYTHON" -m ruff format --check . || exit 1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the workers share the cores
if [ "${1:-}" = --fast ]; then set -- -m "not slow" "${@:2}"; fi
exec "$PYTHON" -m pytest -n "${PYTEST_WORKERS:-3}" --dist worksteal "$@" # on two cores: one waits while others work
