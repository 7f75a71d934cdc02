#!/usr/bin/env bash
# The parts of a training step over sizes, lengths and precisions, into training_benchmark_<timestamp>/.
#   ./run_training_benchmark.sh [flags of run_training_benchmark.py]
set -u
HERE=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd) || exit 1
. "$HERE/launcher_common.sh" || exit 1

launch_sweep run_training_benchmark "$@"
