#!/usr/bin/env bash
# A step timed wrongly in five ways, each against the right one, into timing_study_<timestamp>/.
#   ./run_timing_study.sh [flags of run_timing_study.py]
set -u
HERE=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd) || exit 1
. "$HERE/launcher_common.sh" || exit 1

launch_sweep run_timing_study "$@"
