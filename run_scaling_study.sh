#!/usr/bin/env bash
# Scaling over numbers of ranks and modes, each launch a torchrun of its own, into scaling_study_<timestamp>/.
#   ./run_scaling_study.sh [flags of run_scaling_study.py]
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup/launcher_common.sh" || exit 1
launch run_scaling_study.py scaling_study --output-dir -- "$@"
