#!/usr/bin/env bash
# A study into <name of its document>_<timestamp>/, such as memory_study_<timestamp>/.
#   ./run_study.sh NAME [flags of run_study.py NAME]
#   ./run_study.sh --help     the names
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup/launcher_common.sh" || exit 1
if [ -z "${1:-}" ] || ! [ -f "$HERE/studies/$1.py" ]; then
    without_setup "$HERE/run_study.py" "$@" # which tells the names
fi
case $1 in # what its document is called, as in harness/study_files.py
attention | training) prefix=$1_benchmark ;;
collectives) prefix=collective_benchmark ;;
*) prefix=$1_study ;;
esac
launch "run_study.py $1" "$prefix" --output-dir -- "${@:2}"
