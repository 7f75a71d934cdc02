#!/usr/bin/env bash
# Data types under autocast, their range, and what they do to a step, into precision_study_<timestamp>/.
#   ./run_precision_study.sh [flags of run_precision_study.py]
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup/launcher_common.sh" || exit 1
launch run_precision_study.py precision_study --output-dir -- "$@"
