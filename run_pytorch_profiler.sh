#!/usr/bin/env bash
# Train 20 steps, five of them under torch.profiler, into profiler_results_<timestamp>/.
#   ./run_pytorch_profiler.sh [flags of run_pytorch_profiler.py]
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$HERE/launcher_common.sh"

use_python "$HERE/requirements.txt"
folder=$(value_of --profile-dir "" "$@")
[ -n "$folder" ] || folder=$(new_folder profiler_results) || exit 1
run_logged "$folder" "$PYTHON" "$HERE/run_pytorch_profiler.py" --profile-dir "$folder" "$@"
