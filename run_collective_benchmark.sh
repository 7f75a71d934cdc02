#!/usr/bin/env bash
# Collectives alone, by bytes and number of ranks, into collective_benchmark_<timestamp>/.
#   ./run_collective_benchmark.sh [flags of run_collective_benchmark.py]
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup/launcher_common.sh" || exit 1
launch run_collective_benchmark.py collective_benchmark --output-dir -- "$@"
