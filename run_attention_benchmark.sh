#!/usr/bin/env bash
# Attention alone, by how it is computed, as the sequence grows, into attention_benchmark_<timestamp>/.
#   ./run_attention_benchmark.sh [flags of run_attention_benchmark.py]
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup/launcher_common.sh" || exit 1
launch run_attention_benchmark.py attention_benchmark --output-dir -- "$@"
