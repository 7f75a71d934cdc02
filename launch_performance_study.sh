#!/usr/bin/env bash
# One problem size into performance_results_<size>_<timestamp>/.
#   ./launch_performance_study.sh SIZE [--enable-profilers] [flags of tiny_llama_v1.py]
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$HERE/launcher_common.sh"

use_python "$HERE/requirements.txt"
folder=$(value_of --output-dir "" "$@")
case ${1:-} in "" | -* | */*) folder=${folder:-performance_results} ;; esac # no size: the command says what is wrong
[ -n "$folder" ] || folder=$(new_folder "performance_results_$1") || exit 1
run_logged "$folder" "$PYTHON" "$HERE/launch_performance_study.py" "$@" --output-dir "$folder"
