#!/usr/bin/env bash
# One problem size into performance_results_<size>_<timestamp>/.
#   ./launch_performance_study.sh SIZE [--enable-profilers] [flags of tiny_llama_v1.py]
set -u
HERE=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd) || exit 1
. "$HERE/launcher_common.sh" || exit 1

use_python "$HERE/requirements.txt"
if wants_help "$@"; then exec "$PYTHON" "$HERE/launch_performance_study.py" --help; fi
case ${1:-} in
"" | -* | */*)
    echo "launch_performance_study.sh: error: the first argument is the size: tiny, small, medium, large or very_large" >&2
    exit 2
    ;;
esac
folder=$(value_of --output-dir "" "$@")
[ -n "$folder" ] || folder=$(new_folder "performance_results_$1") || exit 1
run_logged "$folder" "$PYTHON" "$HERE/launch_performance_study.py" "$@" --output-dir "$folder"
