#!/usr/bin/env bash
# Count FLOPs, measure the step, give MFU, bytes moved and the roofline, into flops_results_<timestamp>/.
#   ./run_deepspeed_flops.sh [flags of run_deepspeed_flops.py]
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/launcher_common.sh" || exit 1
folder=$(value_of --profile-dir "" "$@") # another name of --output-dir, which wins over it
[ -z "$folder" ] || set -- --output-dir "$folder" "$@"
launch run_deepspeed_flops.py flops_results --output-dir --computational-intensity --generate-roofline -- "$@"
