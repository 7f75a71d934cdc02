#!/usr/bin/env bash
# Train 20 steps, five of them under torch.profiler, and report, into profiler_results_<timestamp>/.
#   ./run_pytorch_profiler.sh [flags of run_pytorch_profiler.py]
#   ./run_pytorch_profiler.sh --analyze-existing PATH     report on traces that are there, without training
set -u
HERE=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd) || exit 1
. "$HERE/launcher_common.sh" || exit 1

use_python "$HERE/requirements.txt"
if wants_help "$@"; then exec "$PYTHON" "$HERE/run_pytorch_profiler.py" --help; fi
folder=$(value_of --profile-dir "" "$@")
[ -n "$folder" ] || folder=$(new_folder profiler_results) || exit 1
run_logged "$folder" "$PYTHON" "$HERE/run_pytorch_profiler.py" --profile-dir "$folder" --generate-report "$@"
