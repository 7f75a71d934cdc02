#!/usr/bin/env bash
# A step timed wrongly in five ways, each against the right one, into timing_study_<timestamp>/.
#   ./run_timing_study.sh [flags of run_timing_study.py]
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup/launcher_common.sh" || exit 1
launch run_timing_study.py timing_study --output-dir -- "$@"
