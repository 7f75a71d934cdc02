#!/usr/bin/env bash
# Train 20 steps, five of them under torch.profiler, and report, into profiler_results_<timestamp>/.
#   ./run_pytorch_profiler.sh [flags of run_pytorch_profiler.py]
#   ./run_pytorch_profiler.sh --analyze-existing PATH     report on traces that are there, without training
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup/launcher_common.sh" || exit 1
launch run_pytorch_profiler.py profiler_results --profile-dir --generate-report -- "$@"
