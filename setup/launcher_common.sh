# shellcheck shell=bash
# Sourced by every launcher: setup, result folders, logging.  Sourcing it sets variables and
# defines functions, and starts nothing; HERE is the folder of the project.  A launcher calls launch(), at the end.

set -u
HERE=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd) || exit 1

die() { echo "error: $*" >&2; exit 1; }

refuse() { echo "${0##*/}: error: $*" >&2; exit 2; } # wrong arguments

# --- ranks ------------------------------------------------------------------------------------------
#
# Under srun with several tasks, and under the torchrun of launch_multi_node.sh, the launcher is started once for each
# rank.  All share one folder, named after the job; rank 0 alone sets up, and the output of the others is prefixed.

RANK_HERE=0
[ "${SLURM_STEP_NUM_TASKS:-1}" = 1 ] || RANK_HERE=${SLURM_PROCID:-0}
RANK_HERE=${RANK:-$RANK_HERE}
STEP=${SLURM_JOB_ID:-}_${SLURM_STEP_ID:-}

one_process() { [ -z "${RANK:-}" ] && [ "${SLURM_STEP_NUM_TASKS:-1}" = 1 ]; }

# --- setup ------------------------------------------------------------------------------------------
#
# use_python FILE...: sets PYTHON to an interpreter that has the packages of the requirement files.  That is the
# python3 on PATH (an active venv or conda environment, a container, a loaded module) if it has all of them, else
# VENV (.venv in the project), created and filled here.  If the python3 on PATH has torch, VENV is layered on its
# packages: setup never replaces a torch that it did not install.  VENV/made tells which build of torch it has.

VENV=${VENV:-$HERE/.venv}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
WHEELS=https://download.pytorch.org/whl
# shellcheck disable=SC2034 # read by run_tests.sh and make_wheelhouse.sh
TRITON=triton==3.9.0 # for tests: PyTorch's builds for CPUs come without it

packages() { "$1" "$HERE/setup/packages.py" "${@:2}"; } # PYTHON QUESTION ...: see there

version_in() { packages "$1" version "$2" 2>/dev/null; } # PYTHON PACKAGE

missing() { packages "$1" look "${@:2}" | sed 1d; } # PYTHON FILE...: what is missing or too old, one name per line

# find_base [FILE...]: sets BASE, the python3 on PATH if it is new enough, else a newer one beside it; and BASE_HAS,
# what it has of the requirements.
BASE='' BASE_HAS=''
find_base() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.10; do
        BASE_HAS=$(packages "$name" look "$@" 2>/dev/null)
        case $BASE_HAS in torch*) BASE=$(command -v "$name") && return ;; esac
    done
    die "no Python 3.10 or newer on PATH"
}

torch_of() { # HAS: the version of torch; empty without one
    local version=${1%%$'\n'*}
    version=${version#torch}
    version=${version# }
    [ "$version" = none ] || echo "$version"
}

hardware_seen() { # PYTHON [access | accelerator]: see harness/machine/hardware_seen.py
    (cd -- "$HERE" && "$1" -B -m harness.machine.hardware_seen "${@:2}")
}

# find_accelerator: sets ACCELERATOR to cuda DRIVER, rocm ARCHITECTURE, or cpu [ARCHITECTURE...].
ACCELERATOR=''
find_accelerator() {
    [ -n "$BASE" ] || find_base
    [ -n "$ACCELERATOR" ] || ACCELERATOR=$(hardware_seen "$BASE" accelerator)
}

has_gpu() { # for which torch is built
    find_accelerator
    case $ACCELERATOR in cuda* | rocm*) ;; *) return 1 ;; esac
}

rocm_version() { # of the installed ROCm
    { cat "${ROCM_PATH:-/opt/rocm}/.info/version" 2>/dev/null || hipconfig --version 2>/dev/null; } |
        grep -oE '^[0-9]+(\.[0-9]+)+'
}

DEVICE='' # what the flags give --device

complain() { # an error, or a warning with --device cpu
    [ "$DEVICE" = cpu ] || die "$@"
    echo "warning: $*" >&2
}

NO_SOURCE="is there a network, and space in ${TMPDIR:-/tmp} (TMPDIR) and $VENV (VENV)?"
[ -z "${WHEELHOUSE:-}" ] || NO_SOURCE="does WHEELHOUSE have wheels for this Python and these versions? \
setup/make_wheelhouse.sh makes it; $NO_SOURCE"

pip_install() { # PYTHON ARGUMENT...: from the network, or from the wheels in WHEELHOUSE alone
    local from=()
    [ -z "${WHEELHOUSE:-}" ] || from=(--no-index --find-links "$WHEELHOUSE")
    "$1" -m pip install --quiet --quiet --disable-pip-version-check ${from[@]+"${from[@]}"} "${@:2}"
}

uv_choice() { # PYTHON PINNED: the build that uv takes for the driver or the GPU; the pinned version if there is one
    local uv want found
    uv=$(command -v uv) || { "$1" -m pip install --quiet --quiet --disable-pip-version-check uv && uv=${1%/*}/uv; } ||
        return
    for want in "$2" 'torch>=2.6'; do
        found=$(UV_HTTP_RETRIES=1 "$uv" pip install --dry-run --python "$1" --torch-backend=auto "$want" 2>&1 |
            sed -n 's/^ *+ \(torch==[^ ]*\).*/\1/p')
        # Without a build for the GPU, uv takes the one for CPUs.
        case $found in '' | *+cpu) ;; *) echo "$found" && return ;; esac
    done
    return 1
}

nearest_index() { # cu | rocm, VERSION: the newest published index at or below the version
    local index from
    while read -r index from; do
        case $index in "$1"*)
            [ "$(printf '%s\n' "$from" "$2" | sort -V | head -n 1)" != "$from" ] || { echo "$index" && return; }
            ;;
        esac
    done <"$HERE/harness/machine/torch_indexes.txt"
    return 1
}

install_gpu_torch() { # PYTHON PINNED cuda DRIVER | rocm ARCHITECTURE
    local python=$1 pinned=$2 device=$3 gpu version prefix build index
    if [ "$device" = cuda ]; then
        gpu="NVIDIA driver $4" version=$4 prefix=cu
        export UV_CUDA_DRIVER_VERSION=$4
    else
        gpu="AMD $4" version=$(rocm_version) prefix=rocm
        export UV_AMD_GPU_ARCHITECTURE=$4
    fi
    if build=$(uv_choice "$python" "$pinned"); then
        echo "Setup: $build, chosen by uv for $gpu"
        pip_install "$python" --index-url "$WHEELS/${build#*+}" "$build" && return
        die "could not install $build from $WHEELS/${build#*+}; $NO_SOURCE"
    fi
    if [ "$device" = rocm ]; then gpu="ROCm ${version:-of an unknown version}"; fi
    index=$WHEELS/$(nearest_index "$prefix" "$version") ||
        die "found no build of torch for $gpu; set TORCH_INDEX_URL to an index of torch wheels"
    echo "Setup: torch from $index, the newest index for $gpu (uv gave no answer)"
    pip_install "$python" --index-url "$index" "$pinned" 2>/dev/null ||
        pip_install "$python" --index-url "$index" 'torch>=2.6' ||
        die "could not install torch from $index; set TORCH_INDEX_URL to another index of torch wheels"
}

install_torch() { # PYTHON: the build of torch for this machine
    local python=$1 pinned device gpu
    check_gpu access
    pinned=$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' "$HERE/setup/constraints.txt")
    find_accelerator
    read -r device gpu <<<"$ACCELERATOR"
    if [ -n "${WHEELHOUSE:-}" ]; then
        echo "Setup: torch from $WHEELHOUSE"
        pip_install "$python" 'torch>=2.6' || die "could not install torch; $NO_SOURCE"
    elif [ -n "${TORCH_INDEX_URL:-}" ]; then
        echo "Setup: torch from $TORCH_INDEX_URL"
        pip_install "$python" --index-url "$TORCH_INDEX_URL" 'torch>=2.6' ||
            die "could not install torch from $TORCH_INDEX_URL; set TORCH_INDEX_URL to another index of torch wheels"
    elif [ "$device" != cpu ]; then
        install_gpu_torch "$python" "$pinned" "$device" "$gpu"
    else
        if [ -n "$gpu" ]; then gpu="published builds are not for $gpu (TORCH_INDEX_URL names an index)"; fi
        echo "Setup: $pinned for cpu: ${gpu:-no GPU was found}"
        if [ "$(uname -s)" = Linux ]; then
            pip_install "$python" "$pinned+cpu" 2>/dev/null && return
            pip_install "$python" --retries 1 --index-url "$WHEELS/cpu" "$pinned" 2>/dev/null && return
            echo "Setup: no CPU build of torch can be reached, installing the default build (gigabytes)"
        fi
        pip_install "$python" "$pinned" || die "could not install $pinned; $NO_SOURCE"
    fi
}

# VENV/making, later VENV/made, marks what setup made and may remove.  Anything else may be somebody's own environment,
# and a link may lead to one that others use.
make_venv() { # VENV BASE: an environment, layered on BASE's packages if BASE has torch
    local venv=$1 base=$2 python=$1/bin/python
    if [ -n "$(ls -A -- "$venv/" 2>/dev/null)" ]; then
        if [ -L "$venv" ] || ! { [ -e "$venv/made" ] || [ -e "$venv/making" ]; }; then
            die "$venv does not have what is needed, and is not setup's to replace; install requirements.txt there," \
                "rename it, or set VENV to another folder"
        fi
        rm -rf -- "$venv"
    fi
    echo "Setup: creating $venv"
    { mkdir -p -- "$venv" && touch "$venv/making"; } || exit 1
    "$base" -m venv "$venv" || die "$base cannot create environments (on Debian: apt install python3-venv)"
    if version_in "$base" torch >/dev/null; then
        "$base" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
            >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base_environment.pth"
    fi
    mv -- "$venv/making" "$venv/made"
}

fill_venv() { # VENV FILE...: install what is missing
    local venv=$1 python=$1/bin/python has names
    shift
    : >"$venv/made" # empty until everything is installed
    echo "Setup: installs up to 1.3 GB (2.4 GB with the tests; torch for GPUs: several GB more); the download takes minutes"
    version_in "$python" torch >/dev/null || install_torch "$python"
    has=$(packages "$python" look "$@")
    if grep -q '^torch>=' <<<"$has"; then
        die "torch $(torch_of "$has") is too old: the workshop needs 2.6; setup never replaces torch"
    fi
    # The pins apply to what is installed here, not to what is installed already; torch stays as it is.
    packages "$python" pins "$HERE/setup/constraints.txt" >"$venv/constraints.txt"
    names=$(sed 1d <<<"$has" | grep -v '^deepspeed')
    if [ -n "$names" ]; then
        # shellcheck disable=SC2086 # a list of names
        echo "Setup: installing" $names
        # shellcheck disable=SC2086
        pip_install "$python" -c "$venv/constraints.txt" $names ||
            die "could not install the packages above; $NO_SOURCE"
    fi
    if missing "$python" "$@" | grep -q '^deepspeed'; then
        echo "Setup: installing deepspeed"
        if ! pip_install "$python" -c "$venv/constraints.txt" deepspeed; then
            echo "Setup: DeepSpeed could not be installed. Everything except --enable-deepspeed-flops works" \
                "without it; remove $venv/without_deepspeed to try again." >&2
            touch "$venv/without_deepspeed"
        fi
    fi
    echo "Setup: done"
}

install_tab() { # PYTHON: the tab of TensorBoard, from this checkout; all that it needs is in requirements.txt
    pip_install "$1" --no-deps --no-build-isolation --editable "$HERE/tensorboard_plugin" ||
        echo "Setup: TensorBoard's tab STEP PROFILE could not be installed. Everything else works without it." >&2
}

has_everything() { # HAS
    local names
    case $1 in torch*) ;; *) return 1 ;; esac # the Python does not run
    names=$(sed 1d <<<"$1")
    [ ! -e "$VENV/without_deepspeed" ] || names=$(grep -v '^deepspeed' <<<"$names")
    [ -z "$names" ]
}

look_into_venv() { # FILE...: sets VENV_HAS
    VENV_HAS=$(packages "$VENV/bin/python" look "$@" 2>/dev/null)
}

check_kind() { # that VENV was not made on another kind of node; nothing is deleted
    local build='' python='' here fix="rename or remove it, or set VENV to another folder"
    [ -e "$VENV/made" ] || return 0
    read -r build python <"$VENV/made"
    [ -n "$VENV_HAS" ] || die "$VENV was made with ${python:-a Python} and does not run on this node; $fix"
    find_accelerator
    read -r here _ <<<"$ACCELERATOR"
    case $build in '' | "$here"*) return ;; esac
    [ "$here" = cpu ] || # which any build can use
        complain "$VENV has torch for $build, of another kind of node: this one has a GPU for $here; $fix"
}

check_gpu() { # [access]: that torch sees the GPU that is here, or that its device files can be used
    local told
    has_gpu || return 0
    told=$(hardware_seen "$PYTHON" "$@" 2>&1) || complain "${told#error: }"
}

use_caches() { # a home that cannot be written: caches of this user's elsewhere
    local cache
    [ -z "${XDG_CACHE_HOME:-}" ] || return 0
    if [ -n "${HOME:-}" ] && mkdir -p -- "$HOME/.cache" 2>/dev/null && [ -w "$HOME/.cache" ]; then return; fi
    cache=${TMPDIR:-/tmp}/tiny_llama_cache_$(id -u)
    (umask 077 && mkdir -p -- "$cache") 2>/dev/null
    [ -O "$cache" ] || die "cannot write to the home folder, and $cache is not yours; set XDG_CACHE_HOME"
    [ "$RANK_HERE" != 0 ] || echo "The home folder cannot be written; caches are in $cache"
    export XDG_CACHE_HOME=$cache MPLCONFIGDIR=${MPLCONFIGDIR:-$cache/matplotlib}
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton} CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-$cache/nv}
    export MIOPEN_USER_DB_PATH=${MIOPEN_USER_DB_PATH:-$cache/miopen}
    export MIOPEN_CUSTOM_CACHE_DIR=${MIOPEN_CUSTOM_CACHE_DIR:-$cache/miopen}
}

same_torch() { # the torch on PATH, if there is one, is the one in VENV
    local torch
    torch=$(torch_of "$BASE_HAS")
    [ -z "$torch" ] || [ "$(torch_of "$VENV_HAS")" = "$torch" ]
}

is_full() { # VENV is complete, or somebody else's
    { [ -s "$VENV/made" ] || { [ -e "$VENV/made" ] && [ ! -w "$VENV/made" ]; }; } &&
        same_torch && has_everything "$VENV_HAS"
}

set_up() { # FILE...: make VENV complete; the lock has one setup at a time, and tells who failed
    exec 9>"$VENV.lock"
    ! command -v flock >/dev/null || flock 9
    trap 'echo "$STEP failed" >&9' EXIT
    look_into_venv "$@" # another setup may have filled it
    # If python3 has torch, that one is used: a VENV that contains another is replaced.
    if ! { [ -e "$VENV/made" ] && same_torch; }; then
        make_venv "$VENV" "$BASE"
        look_into_venv "$@"
    fi
    has_everything "$VENV_HAS" || fill_venv "$VENV" "$@"
    version_in "$PYTHON" tensorboard-step-profile >/dev/null || install_tab "$PYTHON"
    check_gpu
    packages "$PYTHON" build >"$VENV/made"
    trap - EXIT
    exec 9>&-
}

wait_for_rank_0() { # FILE...
    local seconds=0
    until is_full; do
        ! grep -qsx "$STEP failed" "$VENV.lock" || exit 1 # rank 0 has said why
        [ $((seconds += 2)) -lt 3600 ] || die "rank $RANK_HERE waited an hour for rank 0 to set up $VENV"
        sleep 2
        look_into_venv "$@"
    done
}

use_python() { # FILE...
    find_base "$@"
    [ -d "${WHEELHOUSE:-/}" ] || die "WHEELHOUSE=$WHEELHOUSE is not a folder"
    use_caches
    export PYTHON=$BASE # for the launcher
    has_everything "$BASE_HAS" && return
    PYTHON=$VENV/bin/python
    look_into_venv "$@"
    check_kind
    is_full && return
    { mkdir -p -- "${VENV%/*}" && : >>"$VENV.lock"; } 2>/dev/null ||
        die "cannot create $VENV: set VENV to a folder elsewhere, or activate an environment that has the packages"
    if [ "$RANK_HERE" = 0 ]; then
        set_up "$@"
    else
        wait_for_rank_0 "$@"
    fi
}

# --- flags and folders ------------------------------------------------------------------------------

new_folder() { # PREFIX: creates PREFIX_<timestamp> in the working directory; all ranks of a job share PREFIX_<job>
    if [ -n "${RANK:-}" ] && [ "${TORCHELASTIC_RUN_ID:-none}" != none ]; then
        echo "$1_$TORCHELASTIC_RUN_ID"
    elif [ "${SLURM_STEP_NUM_TASKS:-1}" != 1 ]; then
        echo "$1_$STEP"
    else
        folder_of_its_own "$1_$(date +%Y%m%d_%H%M%S)"
    fi
}

folder_of_its_own() { # NAME: or NAME_2, NAME_3, if two start in one second
    local folder=$1 n=1
    until mkdir "$folder" 2>/dev/null; do
        [ -e "$folder" ] || die "cannot create the folder $PWD/$folder"
        n=$((n + 1))
        folder=$1_$n
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
    case " $* " in *" -h "* | *" --help "*) ;; *) return 1 ;; esac
}

# --- a command, its signals, its log and its exit code ----------------------------------------------

await() { # COMMAND...: run it, with signals passed on to it, and return its exit code
    local child code
    set -m # a job of its own receives Ctrl-C, which the command of a plain `&` would ignore
    "$@" </dev/null 3>&- &
    child=$!
    set +m
    exec 3>&-
    trap 'kill -TERM -- -$child 2>/dev/null' TERM HUP
    trap 'kill -INT -- -$child 2>/dev/null' INT
    while :; do
        { wait "$child" && code=0 || code=$?; } 2>/dev/null # where bash would say which job was killed
        kill -0 "$child" 2>/dev/null || break               # a signal ends `wait`, not the command
    done
    return "$code"
}

hand_on() { # CODE: exit with it, and tell it the launcher that started this one as a rank
    [ -z "${EXIT_CODES:-}" ] || echo "$1" >>"$EXIT_CODES"
    exit "$1"
}

# run_logged FOLDER COMMAND...: run with output to the terminal and to FOLDER/training_output.log, with the rank in the
# name if it is not 0; exits with the command's code.  Signals go to the command, which then reports.
run_logged() {
    local folder=$1 log=$1/training_output.log earlier code
    shift
    mkdir -p -- "$folder" 2>/dev/null
    if ! [ -d "$folder" ] || ! [ -w "$folder" ]; then
        one_process && die "cannot write to folder $folder"
        await "$@" 2>&1 # which finds that, too, and tells the other ranks
        hand_on $?
    fi
    [ "$RANK_HERE" = 0 ] || log=$folder/training_output_rank$RANK_HERE.log
    earlier=$(move_earlier "$log")
    if [ "$RANK_HERE" = 0 ]; then export TINY_LLAMA_LOG=$log; fi
    export PYTHONUNBUFFERED=1
    start_logger "$log"
    await "$@" >&3 2>&1
    code=$?
    exec 3>&-
    wait "$LOGGER" 2>/dev/null
    case $code in
    2) as_if_not_run "$folder" "$log" "$earlier" ;; # wrong arguments
    137) say_killed "$log" ;;
    esac
    hand_on "$code"
}

move_earlier() { # LOG: of an earlier run, to a name with its time; the command moves that run aside, this file with it
    local earlier
    [ -s "$1" ] || return
    earlier=${1%.log}.$(date -r "$1" +%Y%m%d_%H%M%S).log
    mv -- "$1" "$earlier"
    echo "$earlier"
}

start_logger() { # LOG: what is written to descriptor 3 goes to it and to the terminal; sets LOGGER, the process
    # It ignores signals, so that what the command reports after one is logged.
    exec 3> >(trap '' INT TERM HUP PIPE; exec 2>/dev/null; if [ "$RANK_HERE" = 0 ]; then
        exec tee -- "$1"
    else
        tee -- "$1" | sed -u "s/^/[rank $RANK_HERE] /"
    fi)
    LOGGER=$!
}

as_if_not_run() { # FOLDER LOG EARLIER_LOG
    rm -f -- "$2"
    [ -z "$3" ] || mv -- "$3" "$2"
    rmdir -- "$1" 2>/dev/null
}

say_killed() { # LOG
    one_process || return # of several ranks, another one tells
    echo "error: killed by SIGKILL, as the operating system does when memory runs out" | tee -a -- "$1" >&2
}

# --- what launchers call ----------------------------------------------------------------------------

check_tasks() { # SCRIPT: that it runs as ranks, if srun starts several tasks
    local tasks=${SLURM_NTASKS:-1}
    case ${WRAPPER:-}$1 in
    tiny_llama_v1.py | run_pytorch_profiler.py | run_deepspeed_flops.py | launch_performance_study.py)
        [ "$tasks" = 1 ] || [ "${SLURM_STEP_NUM_TASKS:-1}" != 1 ] ||
            echo "Note: this Slurm job has $tasks tasks, and this is one process; 'srun ${0##*/}' starts one in each"
        ;;
    *)
        [ "${SLURM_STEP_NUM_TASKS:-1}" != 1 ] || return 0
        [ "$RANK_HERE" = 0 ] || exit 1
        die "${0##*/} is one process, and srun started $SLURM_STEP_NUM_TASKS: use srun --ntasks=1"
        ;;
    esac
}

without_setup() { # SCRIPT ARGUMENT...: --help, or what ends at once
    local python=$VENV/bin/python
    if ! [ -x "$python" ]; then
        find_base
        python=$BASE
    fi
    exec "$python" "$@"
}

# launch SCRIPT PREFIX FLAG [FLAGS...] -- ARGUMENT...: run SCRIPT with FLAGS and the arguments, in the folder that the
# arguments resume or name with --output-dir or FLAG, else in a new PREFIX_<timestamp>/; under WRAPPER FOLDER, if set.
# SCRIPT may be two words: a script, and the argument that comes before its flags.
launch() {
    local script=("$HERE/${1%% *}") prefix=$2 flag=$3 folder flags=()
    case $1 in *' '*) script+=("${1#* }") ;; esac
    shift 3
    while [ "$1" != -- ]; do
        flags+=("$1")
        shift
    done
    shift
    check_tasks "${script[0]##*/}"
    wants_help "$@" && without_setup "${script[@]}" --help
    DEVICE=$(value_of --device "" "$@")
    use_python "$HERE/requirements.txt"
    folder=$(value_of --resume "$(value_of --output-dir "$(value_of "$flag" "" "$@")" "$@")" "$@")
    if [ -z "$folder" ]; then
        folder=$(new_folder "$prefix") || exit 1
        flags=("$flag" "$folder" ${flags[@]+"${flags[@]}"})
    fi
    run_logged "$folder" ${WRAPPER:+"$WRAPPER" "$folder"} "$PYTHON" "${script[@]}" ${flags[@]+"${flags[@]}"} "$@"
}
