#!/usr/bin/env bash
# The ladder of optimizations, each alone and one on top of another, into optimization_study_<timestamp>/.
#   ./run_optimization_study.sh [flags of run_optimization_study.py]
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup/launcher_common.sh" || exit 1
launch run_optimization_study.py optimization_study --output-dir -- "$@"
