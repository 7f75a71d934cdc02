#!/usr/bin/env bash
# Download what set-up installs, for nodes without a network: for this Python and platform, with the build of torch for
# the GPU of this machine, or from TORCH_INDEX_URL where this machine has none.
#   setup/make_wheelhouse.sh FOLDER
#   TORCH_INDEX_URL=https://download.pytorch.org/whl/rocm6.4 setup/make_wheelhouse.sh FOLDER
#   WHEELHOUSE=FOLDER ./run_baseline.sh     on the node
# shellcheck disable=SC2317 # fill_venv calls pip_install
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/launcher_common.sh" || exit 1
if wants_help "$@"; then
    sed -n '2,6s/^# *//p' "$HERE/setup/make_wheelhouse.sh"
    exit
fi
case ${1:-} in
"" | -*) refuse "the first argument is the folder for the wheels" ;;
esac
{ mkdir -p -- "$1" && [ -w "$1" ] && folder=$(cd -- "$1" && pwd); } 2>/dev/null || die "cannot write to folder $1"

pip_install() { # PYTHON ARGUMENT...: what is missing into the folder, and from there alone into the environment
    local pip=("$1" -m pip --quiet --quiet --disable-pip-version-check) report=$work/report.json
    shift
    "${pip[@]}" install --dry-run --report "$report" "$@" &&
        packages "${pip[0]}" urls "$report" >"$work/wanted.txt" &&
        "${pip[@]}" wheel --no-deps --wheel-dir "$folder" -r "$work/wanted.txt" &&
        "${pip[@]}" install --no-index --find-links "$folder" "$@"
}

find_base
use_caches
work=$(mktemp -d) || exit 1
trap 'rm -rf -- "$work"' EXIT
make_venv "$work/venv" "$BASE"
"$work/venv/bin/python" -m pip install --quiet --quiet --upgrade pip # --report needs 22.2
fill_venv "$work/venv" "$HERE/requirements.txt" "$HERE/setup/requirements-dev.txt"
"$work/venv/bin/python" -c 'import triton' 2>/dev/null || pip_install "$work/venv/bin/python" "$TRITON" ||
    echo "Triton cannot be downloaded here: run_tests.sh will skip the tests of kernels/ on the node" >&2
wheels=("$folder"/*.whl)
echo "Wheelhouse: ${#wheels[@]} wheels in $folder, for $(packages "$work/venv/bin/python" build)"
echo "On the node: WHEELHOUSE=$folder ./run_baseline.sh"
