#!/usr/bin/env bash
# Train or profile on many ranks, one for each GPU, on one node or several, into multi_node_results_<job>/: one folder
# for all ranks, with a log of each.
#   srun [...] ./launch_multi_node.sh train|profile [flags]             in a Slurm job, one task for each GPU
#   ./launch_multi_node.sh [flags of torchrun] train|profile [flags]    on every node, or on the only one
# The flags at the end are those of tiny_llama_v1.py and run_pytorch_profiler.py.  Without flags of torchrun, all GPUs
# of this node take part, or two processes where there is none.  Ranks that do not meet within a minute end the run.
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup/launcher_common.sh" || exit 1

run_as_rank() { # train|profile ARGUMENT...
    case $1 in
    train) launch tiny_llama_v1.py multi_node_results --output-dir -- "${@:2}" ;;
    profile) launch run_pytorch_profiler.py multi_node_results --profile-dir --generate-report -- "${@:2}" ;;
    esac
}

launcher_flags=()
while [ $# -gt 0 ] && [ "$1" != train ] && [ "$1" != profile ]; do
    launcher_flags+=("$1")
    shift
done
if wants_help ${launcher_flags[@]+"${launcher_flags[@]}"}; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
[ $# -gt 0 ] || refuse "say what to do: train or profile; flags of torchrun come before that word, others after it"
if [ ${#launcher_flags[@]} = 0 ] && { [ -n "${RANK:-}" ] || [ "${SLURM_STEP_NUM_TASKS:-1}" != 1 ]; }; then
    run_as_rank "$@"
fi

# One torchrun on each node, which starts this launcher again for each of its ranks.

given() { # FLAG of torchrun, with - between words, which torchrun takes with _ or shortened, too: its last value
    local flag name value='' takes=
    for flag in ${launcher_flags[@]+"${launcher_flags[@]}"}; do
        [ -z "$takes" ] || value=$flag
        takes=
        case $flag in --*) ;; *) continue ;; esac
        name=${flag%%=*}
        name=${name//_/-}
        case $1 in "$name"*) ;; *) continue ;; esac
        case $flag in *=*) value=${flag#*=} ;; *) takes=1 ;; esac
    done
    echo "$value"
}
nodes=$(given --nnodes)
if [ "${nodes:-1}" = 1 ]; then
    [ -n "$(given --rdzv-endpoint)$(given --master-port)" ] || launcher_flags+=(--standalone)
elif [ -z "$(given --rdzv-conf)" ]; then # seconds, by the name that each backend has for it
    launcher_flags+=(--rdzv-conf "timeout=60,join_timeout=60")
fi
folder_flag=--output-dir
[ "$1" = train ] || folder_flag=--profile-dir
chosen=$(value_of --output-dir "$(value_of "$folder_flag" "" "${@:2}")" "${@:2}")
[ "${nodes:-1}" = 1 ] || [ -n "$chosen$(given --rdzv-id)" ] ||
    refuse "--nnodes $nodes: give --rdzv-id NAME, the same on all nodes; results go to multi_node_results_NAME/"
if wants_help "$@"; then run_as_rank "$@"; fi
DEVICE=$(value_of --device "" "${@:2}")
use_python "$HERE/requirements.txt"
if [ -z "$(given --nproc-per-node)" ]; then
    count=2
    if [ "$DEVICE" != cpu ] && has_gpu; then count=gpu; fi
    launcher_flags+=(--nproc-per-node "$count")
fi
if [ -z "$chosen" ]; then
    folder=multi_node_results_$(given --rdzv-id)
    [ -n "$(given --rdzv-id)" ] || folder=$(new_folder multi_node_results) || exit 1
    set -- "$1" "$folder_flag" "$folder" "${@:2}"
fi
EXIT_CODES=$(mktemp) && said=$(mktemp) || die "cannot write to ${TMPDIR:-/tmp}"
trap 'rm -f -- "$EXIT_CODES" "$said"' EXIT
export EXIT_CODES OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# What torchrun says about ranks that failed takes forty lines; the ranks have said it in one.
await "$PYTHON" -m torch.distributed.run "${launcher_flags[@]}" --no-python "$HERE/launch_multi_node.sh" "$@" 2>"$said"
code=$?
[ "$code" != 0 ] || exit 0
[ "${TINY_LLAMA_DEBUG:-}" != 1 ] || cat -- "$said" >&2
if rank_code=$(sort -n -- "$EXIT_CODES" | grep -m 1 -vx 0); then exit "$rank_code"; fi
rmdir -- "${folder:-/nowhere}" 2>/dev/null
why=$(grep -E '(Error|error): *[^ ]' -- "$said" | tail -n 1 | sed 's/^.*[Ee]rror: //; s/\.$//')
[ "$code" != 2 ] || refuse "$why"
die "torchrun on $(hostname) started no rank: ${why:-exit code $code}; start the same command on each node within a minute"
