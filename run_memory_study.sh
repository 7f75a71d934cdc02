#!/usr/bin/env bash
# Memory over batch sizes and sequence lengths, predicted, measured and fitted, into memory_study_<timestamp>/.
#   ./run_memory_study.sh [flags of run_memory_study.py]
set -u
HERE=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd) || exit 1
. "$HERE/launcher_common.sh" || exit 1

launch_sweep run_memory_study "$@"
