#!/usr/bin/env bash
# One problem size into performance_results_<size>_<timestamp>/.
#   ./launch_performance_study.sh SIZE [--enable-profilers] [flags of tiny_llama_v1.py]
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup/launcher_common.sh" || exit 1
if ! wants_help "$@"; then
    case ${1:-} in
    "" | -* | */*) refuse "the first argument is the size: tiny, small, medium, large or very_large" ;;
    esac
fi
launch launch_performance_study.py "performance_results_${1:-}" --output-dir -- "$@"
