#!/usr/bin/env bash
# Train without profiling, into baseline_results_<timestamp>/.  Sets up what is missing.
#   ./run_baseline.sh [flags of tiny_llama_v1.py]
set -u
HERE=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd) || exit 1
. "$HERE/launcher_common.sh" || exit 1

use_python "$HERE/requirements.txt"
if wants_help "$@"; then exec "$PYTHON" "$HERE/tiny_llama_v1.py" --help; fi
folder=$(value_of --output-dir "" "$@")
[ -n "$folder" ] || folder=$(new_folder baseline_results) || exit 1
run_logged "$folder" "$PYTHON" "$HERE/tiny_llama_v1.py" --output-dir "$folder" "$@"
