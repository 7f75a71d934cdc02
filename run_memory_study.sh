#!/usr/bin/env bash
# Memory over batch sizes and sequence lengths, predicted, measured and fitted, into memory_study_<timestamp>/.
#   ./run_memory_study.sh [flags of run_memory_study.py]
set -u
HERE=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd) || exit 1
. "$HERE/launcher_common.sh" || exit 1

use_python "$HERE/requirements.txt"
if wants_help "$@"; then exec "$PYTHON" "$HERE/run_memory_study.py" --help; fi
folder=$(value_of --output-dir "" "$@")
[ -n "$folder" ] || folder=$(new_folder memory_study) || exit 1
run_logged "$folder" "$PYTHON" "$HERE/run_memory_study.py" "$@" --output-dir "$folder"
