# Sourced by every launcher: setup, result folders, logging.  Sourcing it only sets HERE, the folder of the project.

set -u
HERE=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd) || exit 1

die() { echo "error: $*" >&2; exit 1; }

# --- setup ------------------------------------------------------------------------------------------
#
# use_python FILE...: sets PYTHON to an interpreter that has the packages of the requirement files.  That is the
# python3 on PATH (an active venv or conda environment, a container, a loaded module) if it has all of them, else
# .venv in the project, created and filled here.  If the python3 on PATH has torch, .venv is layered on its packages:
# setup never replaces an installed torch.

MISSING_SCRIPT='
import re, sys
from importlib import metadata
numbers = lambda text: [int(n) for n in re.findall(r"\d+", text.split("+")[0])]
for path in sys.argv[1:]:
    for line in open(path):
        name, _, minimum = line.split("#")[0].strip().partition(">=")
        try:
            if name and numbers(metadata.version(name)) < numbers(minimum):
                print(f"{name}>={minimum}")
        except metadata.PackageNotFoundError:
            print(name)
'

PINS_SCRIPT='
import sys
from importlib import metadata
for line in open(sys.argv[1]):
    name = line.split("#")[0].split("==")[0].strip()
    try:
        if name == "torch":
            print("torch==" + metadata.version(name))
        elif name:
            metadata.version(name)
    except metadata.PackageNotFoundError:
        print(line.strip())
'

missing() { "$1" -c "$MISSING_SCRIPT" "${@:2}"; } # PYTHON FILE...: what is missing or too old, one name per line

version_in() { # PYTHON PACKAGE
    "$1" -c 'import sys; from importlib import metadata; print(metadata.version(sys.argv[1]))' "$2" 2>/dev/null
}

base_python() { # the python3 on PATH if it is new enough, else a newer one beside it
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.10; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    die "no Python 3.10 or newer on PATH"
}

accelerator() { # what this machine computes on: rocm, cuda or cpu
    if rocminfo 2>/dev/null | grep -q 'Name: *gfx'; then
        echo rocm
    elif nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
        echo cuda
    else
        echo cpu
    fi
}

rocm_version() { # major.minor of the installed ROCm
    { cat "${ROCM_PATH:-/opt/rocm}/.info/version" 2>/dev/null || hipconfig --version 2>/dev/null; } |
        grep -oE '^[0-9]+\.[0-9]+'
}

install_torch() { # PIP...: the build of torch for this machine
    local pinned index=${TORCH_INDEX_URL:-} wheels=https://download.pytorch.org/whl device
    pinned=$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' "$HERE/constraints.txt")
    device=$(accelerator)
    if [ -z "$index" ] && [ "$device" = rocm ]; then
        index=$wheels/rocm$(rocm_version) ||
            die "cannot find out the version of ROCm; set TORCH_INDEX_URL to an index of torch wheels"
    fi
    if [ -n "$index" ]; then
        echo "Setup: torch from $index"
        "$@" --index-url "$index" 'torch>=2.6' ||
            die "could not install torch from $index; set TORCH_INDEX_URL to another index of torch wheels"
        return
    fi
    echo "Setup: $pinned for $device"
    if [ "$device" = cpu ] && [ "$(uname -s)" = Linux ]; then
        "$@" "$pinned+cpu" 2>/dev/null && return
        "$@" --retries 1 --index-url "$wheels/cpu" "$pinned" 2>/dev/null && return
        echo "Setup: no CPU build of torch can be reached, installing the default build (gigabytes)"
    fi
    "$@" "$pinned" || die "could not install $pinned; is there a network?"
}

make_venv() { # VENV BASE: an environment, layered on BASE's packages if BASE has torch
    local venv=$1 base=$2 python=$1/bin/python
    [ -w "$HERE" ] || die "$HERE is not writable: cannot create .venv; activate an environment that has the packages"
    echo "Setup: creating $venv"
    "$base" -m venv --clear "$venv" || die "$base cannot create environments (on Debian: apt install python3-venv)"
    if version_in "$base" torch >/dev/null; then
        "$base" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
            >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base_environment.pth"
    fi
    touch "$venv/made" # without this file, an earlier setup was interrupted
}

fill_venv() { # VENV FILE...: install what is missing
    local venv=$1 python=$1/bin/python names
    shift
    local pip=("$python" -m pip install --quiet --quiet --disable-pip-version-check)
    version_in "$python" torch >/dev/null || install_torch "${pip[@]}"
    if missing "$python" "$@" | grep -q '^torch>='; then
        die "torch $(version_in "$python" torch) is too old: the workshop needs 2.6; setup never replaces torch"
    fi
    # The pins apply to what is installed here, not to what is installed already; torch stays as it is.
    "$python" -c "$PINS_SCRIPT" "$HERE/constraints.txt" >"$venv/constraints.txt"
    pip+=(-c "$venv/constraints.txt")
    names=$(missing "$python" "$@" | grep -v '^deepspeed')
    if [ -n "$names" ]; then
        # shellcheck disable=SC2086 # a list of names
        echo "Setup: installing" $names
        # shellcheck disable=SC2086
        "${pip[@]}" $names || die "could not install the packages above; is there a network?"
    fi
    if missing "$python" "$@" | grep -q '^deepspeed'; then
        echo "Setup: installing deepspeed"
        if ! "${pip[@]}" deepspeed; then
            echo "Setup: DeepSpeed could not be installed. Everything except --enable-deepspeed-flops works" \
                "without it; remove $venv/without_deepspeed to try again." >&2
            touch "$venv/without_deepspeed"
        fi
    fi
    echo "Setup: done"
}

has_everything() { # PYTHON FILE...
    local names
    names=$(missing "$@" 2>/dev/null) || return 1
    [ ! -e "$HERE/.venv/without_deepspeed" ] || names=$(grep -v '^deepspeed' <<<"$names")
    [ -z "$names" ]
}

use_python() { # FILE...
    local base venv=$HERE/.venv torch
    base=$(base_python) || exit 1
    export PYTHON=$base # for the launcher
    torch=$(version_in "$base" torch)
    # If python3 has torch, that one is used: a .venv that contains another is replaced.
    if [ -e "$venv/made" ] && [ -n "$torch" ] && [ "$(version_in "$venv/bin/python" torch)" != "$torch" ]; then
        rm -f "$venv/made"
    fi
    has_everything "$PYTHON" "$@" && return
    PYTHON=$venv/bin/python
    [ -e "$venv/made" ] && has_everything "$PYTHON" "$@" && return
    if [ -w "$HERE" ] && command -v flock >/dev/null; then # one setup at a time
        exec 9>"$HERE/.setup.lock"
        flock 9
    fi
    { [ -e "$venv/made" ] && "$PYTHON" -c '' 2>/dev/null; } || make_venv "$venv" "$base"
    has_everything "$PYTHON" "$@" || fill_venv "$venv" "$@"
    exec 9>&-
}

# --- runs --------------------------------------------------------------------------------------------

new_folder() { # PREFIX: creates PREFIX_<timestamp> in the working directory; two in one second get two names
    local stamp folder n=1
    stamp=$(date +%Y%m%d_%H%M%S)
    folder=$1_$stamp
    until mkdir "$folder" 2>/dev/null; do
        [ -e "$folder" ] || die "cannot create the folder $PWD/$folder"
        n=$((n + 1))
        folder=$1_${stamp}_$n
    done
    echo "$folder"
}

value_of() { # FLAG DEFAULT ARGUMENT...: the last value that the arguments give the flag, else the default
    local flag=$1 value=$2 previous=
    for argument in "${@:3}"; do
        [ "$previous" != "$flag" ] || value=$argument
        case $argument in "$flag"=*) value=${argument#*=} ;; esac
        previous=$argument
    done
    echo "$value"
}

wants_help() { # ARGUMENT...
    local argument
    for argument in "$@"; do
        case $argument in -h | --help) return 0 ;; esac
    done
    return 1
}

# run_logged FOLDER COMMAND...: run with output to the terminal and to FOLDER/training_output.log; exits with the
# command's code.  Signals go to the command, which then reports; tee ignores them, so that the report is logged.
run_logged() {
    local folder=$1 log=$1/training_output.log earlier='' child logger code
    shift
    mkdir -p -- "$folder" 2>/dev/null
    if ! [ -d "$folder" ] || ! [ -w "$folder" ]; then die "cannot write to folder $folder"; fi
    if [ -s "$log" ]; then # of an earlier run: the command moves that run aside, and this file with it
        earlier=$folder/training_output.$(date -r "$log" +%Y%m%d_%H%M%S).log
        mv -- "$log" "$earlier"
    fi
    export TINY_LLAMA_LOG=$log PYTHONUNBUFFERED=1
    exec 3> >(trap '' INT TERM HUP PIPE; exec tee -- "$log" 2>/dev/null)
    logger=$!
    set -m # a job of its own receives Ctrl-C, which the command of a plain `&` would ignore
    "$@" </dev/null >&3 2>&1 3>&- &
    child=$!
    set +m
    exec 3>&-
    trap 'kill -TERM -- -$child 2>/dev/null' TERM HUP
    trap 'kill -INT -- -$child 2>/dev/null' INT
    wait "$child"
    code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ends `wait`, not the command
        wait "$child"
        code=$?
    done
    wait "$logger" 2>/dev/null
    if [ "$code" = 2 ]; then # wrong arguments: nothing was run, so nothing is left or changed
        rm -f -- "$log"
        [ -z "$earlier" ] || mv -- "$earlier" "$log"
        rmdir -- "$folder" 2>/dev/null
    fi
    exit "$code"
}

# launch SCRIPT PREFIX FLAG [FLAGS...] -- ARGUMENT...: run SCRIPT with FLAGS and the arguments, in the folder that the
# arguments name with FLAG (or resume), else in a new PREFIX_<timestamp>/; under WRAPPER FOLDER, if that is set.
launch() {
    local script=$HERE/$1 prefix=$2 flag=$3 folder flags=()
    shift 3
    while [ "$1" != -- ]; do
        flags+=("$1")
        shift
    done
    shift
    use_python "$HERE/requirements.txt"
    if wants_help "$@"; then exec "$PYTHON" "$script" --help; fi
    folder=$(value_of --resume "" "$@")
    if [ -z "$folder" ]; then
        folder=$(value_of "$flag" "" "$@")
        [ -n "$folder" ] || folder=$(new_folder "$prefix") || exit 1
        flags=("$flag" "$folder" ${flags[@]+"${flags[@]}"})
    fi
    run_logged "$folder" ${WRAPPER:+"$WRAPPER" "$folder"} "$PYTHON" "$script" ${flags[@]+"${flags[@]}"} "$@"
}
