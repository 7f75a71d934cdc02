#!/usr/bin/env bash
# Train without profiling, into baseline_results_<timestamp>/.  Sets up what is missing.
#   ./run_baseline.sh [flags of tiny_llama_v1.py]
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$HERE/launcher_common.sh"

use_python "$HERE/requirements.txt"
folder=$(value_of --output-dir "" "$@")
[ -n "$folder" ] || folder=$(new_folder baseline_results) || exit 1
run_logged "$folder" "$PYTHON" "$HERE/tiny_llama_v1.py" --output-dir "$folder" "$@"
