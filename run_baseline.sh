#!/usr/bin/env bash
# Train without profiling, into baseline_results_<timestamp>/.  Sets up what is missing.
#   ./run_baseline.sh [flags of tiny_llama_v1.py]
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup/launcher_common.sh" || exit 1
launch tiny_llama_v1.py baseline_results --output-dir -- "$@"
