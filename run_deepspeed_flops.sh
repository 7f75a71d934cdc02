#!/usr/bin/env bash
# Count FLOPs, measure the step, give MFU and arithmetic intensity, into flops_results_<timestamp>/.
#   ./run_deepspeed_flops.sh [flags of run_deepspeed_flops.py]
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$HERE/launcher_common.sh"

use_python "$HERE/requirements.txt"
folder=$(value_of --output-dir "$(value_of --profile-dir "" "$@")" "$@")
[ -n "$folder" ] || folder=$(new_folder flops_results) || exit 1
run_logged "$folder" "$PYTHON" "$HERE/run_deepspeed_flops.py" --output-dir "$folder" --computational-intensity "$@"
