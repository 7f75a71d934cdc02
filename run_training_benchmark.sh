#!/usr/bin/env bash
# The parts of a training step over sizes, lengths and precisions, into training_benchmark_<timestamp>/.
#   ./run_training_benchmark.sh [flags of run_training_benchmark.py]
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup/launcher_common.sh" || exit 1
launch run_training_benchmark.py training_benchmark --output-dir -- "$@"
