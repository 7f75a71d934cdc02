#!/usr/bin/env bash
# Data types under autocast, their range, and what they do to a step, into precision_study_<timestamp>/.
#   ./run_precision_study.sh [flags of run_precision_study.py]
set -u
HERE=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd) || exit 1
. "$HERE/launcher_common.sh" || exit 1

launch_sweep run_precision_study "$@"
