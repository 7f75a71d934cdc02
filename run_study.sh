#!/usr/bin/env bash
# A study into <name of its document>_<timestamp>/, such as memory_study_<timestamp>/.
#   ./run_study.sh NAME [flags of run_study.py NAME]
#   ./run_study.sh --help     the names
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup/launcher_common.sh" || exit 1
case ${1:-} in
attention | training) prefix=$1_benchmark ;;
collectives) prefix=collective_benchmark ;;
memory | optimization | precision | scaling | timing) prefix=$1_study ;;
*) without_setup "$HERE/run_study.py" "$@" ;; # which tells the names
esac
launch "run_study.py $1" "$prefix" --output-dir -- "${@:2}"
