#!/usr/bin/env bash
# Count FLOPs, measure the step, give MFU, bytes moved and the roofline, into flops_results_<timestamp>/.
#   ./run_deepspeed_flops.sh [flags of run_deepspeed_flops.py]
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup/launcher_common.sh" || exit 1
launch run_deepspeed_flops.py flops_results --profile-dir --computational-intensity --generate-roofline -- "$@"
