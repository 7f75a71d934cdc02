#!/usr/bin/env bash
# Memory over batch sizes and sequence lengths, predicted, measured and fitted, into memory_study_<timestamp>/.
#   ./run_memory_study.sh [flags of run_memory_study.py]
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup/launcher_common.sh" || exit 1
launch run_memory_study.py memory_study --output-dir -- "$@"
