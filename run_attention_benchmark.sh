#!/usr/bin/env bash
# Attention alone, by how it is computed, as the sequence grows, into attention_benchmark_<timestamp>/.
#   ./run_attention_benchmark.sh [flags of run_attention_benchmark.py]
set -u
HERE=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd) || exit 1
. "$HERE/launcher_common.sh" || exit 1

launch_sweep run_attention_benchmark "$@"
