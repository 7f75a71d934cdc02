#!/usr/bin/env bash
# Set up what is missing, check format and lint, and run the tests.
#   ./run_tests.sh [flags of pytest]            every module and every command: about three minutes on two cores
#   ./run_tests.sh --all [flags of pytest]      everything: a quarter of an hour
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup/launcher_common.sh" || exit 1

MARKED=(-m "not slow")
ALL=
WORKERS=3 # on two cores: one waits while others work
case ${1:-} in
    --all) MARKED=(--alone without) ALL=yes WORKERS=4 && shift ;; # more of its tests wait: for ranks, signals, a browser
    --fast) refuse "--fast: is gone; ./run_tests.sh runs the short set, ./run_tests.sh --all everything" ;;
esac
# shellcheck disable=SC2034 # read by use_python: without the GPU, its tests are skipped
DEVICE=cpu
use_python "$HERE/requirements.txt" "$HERE/setup/requirements-dev.txt"
# In Triton's interpreter the kernels are tested where there is no GPU.
if [ "$PYTHON" = "$VENV/bin/python" ] && ! "$PYTHON" -c 'import triton' 2>/dev/null; then
    pip_install "$PYTHON" "$TRITON" || echo "Triton cannot be installed here: tests of kernels/ are skipped" >&2
fi
cd "$HERE" || exit 1
"$PYTHON" -m ruff check . && "$PYTHON" -m ruff format --check . || exit 1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the workers share the cores
FAILED=0
"$PYTHON" -m pytest -n "${PYTEST_WORKERS:-$WORKERS}" --dist worksteal "${MARKED[@]}" "$@" || FAILED=$?
[ "$ALL" ] || exit "$FAILED"
# Flags may choose none of the tests of the one kind or of the other.
NO_TESTS=5 # exit codes of pytest
case $FAILED in
    0 | 1 | "$NO_TESTS") ;;
    *) exit "$FAILED" ;; # it was interrupted, or could not begin
esac
ALONE=0
"$PYTHON" -m pytest --alone only "$@" || ALONE=$?
[ "$FAILED" -ne 1 ] || exit 1
[ "$ALONE" -ne "$NO_TESTS" ] || exit "$FAILED"
exit "$ALONE"
