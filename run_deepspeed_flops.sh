#!/usr/bin/env bash
# Count FLOPs, measure the step, give MFU, bytes moved and the roofline, into flops_results_<timestamp>/.
#   ./run_deepspeed_flops.sh [flags of run_deepspeed_flops.py]
set -u
HERE=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd) || exit 1
. "$HERE/launcher_common.sh" || exit 1

use_python "$HERE/requirements.txt"
if wants_help "$@"; then exec "$PYTHON" "$HERE/run_deepspeed_flops.py" --help; fi
folder=$(value_of --output-dir "$(value_of --profile-dir "" "$@")" "$@")
[ -n "$folder" ] || folder=$(new_folder flops_results) || exit 1
run_logged "$folder" "$PYTHON" "$HERE/run_deepspeed_flops.py" --output-dir "$folder" --computational-intensity \
    --generate-roofline "$@"
