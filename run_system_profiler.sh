#!/usr/bin/env bash
# Train 20 steps under rocprofv3 (ROCm) or nsys (CUDA), five of them with ranges of steps, phases, the model's parts and
# operators, into system_profile_<timestamp>/; print the tool's table of kernels, and what our analysis says.
#   ./run_system_profiler.sh [flags of tiny_llama_v1.py]
#   ./run_system_profiler.sh --warmup-steps 10 --profile-steps 2     capture steps 11 and 12
# shellcheck disable=SC2034,SC2317,SC2329 # WRAPPER is read by launch, which calls under_profiler
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup/launcher_common.sh" || exit 1

GET_ROCPROFV3="rocprofv3, of ROCm 6.2 or newer (apt install rocprofiler-sdk)"
GET_NSYS="nsys, of NVIDIA Nsight Systems (apt install nsight-systems-cli)"

find_tool() { # rocprofv3 | nsys: its path, also where ROCm and CUDA leave it off PATH
    (PATH=$PATH:${ROCM_PATH:-/opt/rocm}/bin:${CUDA_HOME:-/usr/local/cuda}/bin && command -v "$1")
}

choose_tool() { # sets GPU, TOOL and TOOL_HELP; a tool sees the GPUs of its own vendor alone
    find_accelerator
    read -r GPU _ <<<"$ACCELERATOR"
    case $GPU in
    rocm) TOOL=$(find_tool rocprofv3) || die "this AMD GPU needs $GET_ROCPROFV3, on PATH" ;;
    cuda) TOOL=$(find_tool nsys) || die "this NVIDIA GPU needs $GET_NSYS, on PATH" ;;
    cpu) # also a container in which the driver does not show itself: torch may see more
        TOOL=$(find_tool nsys || find_tool rocprofv3) ||
            die "no system profiler on PATH: an AMD GPU needs $GET_ROCPROFV3; an NVIDIA GPU needs $GET_NSYS"
        ;;
    esac
    case $TOOL in *rocprofv3) TOOL_HELP=$("$TOOL" --help 2>&1) ;; esac
}

has_word() { grep -qw -e "$1" <<<"$2"; } # WORD TEXT

first_word_of() { # TEXT WORD...: the first of the words that the text has, or none
    local word
    for word in "${@:2}"; do
        has_word "$word" "$1" && echo "$word" && return
    done
}

# What follows runs as the job of run_logged.  A signal also reaches the tool and the training, which report and end;
# the traps keep this shell alive to name the profile.  The exit code is that of the training, or 1 where that was good
# and its profile cannot be analyzed.

under_profiler() { # FOLDER COMMAND...
    local folder=$1 began code interrupted=0
    shift
    trap 'interrupted=130' INT
    trap 'interrupted=143' TERM
    began=$(date +%s)
    echo "System profiler: $TOOL"
    if [ "$GPU" = cpu ]; then
        echo "No GPU found: without one there are no ranges and no kernels"
    else
        probe || return
        [ "$interrupted" = 0 ] || return "$interrupted"
    fi
    case $TOOL in *rocprofv3) under_rocprofv3 "$@" ;; *) under_nsys "$@" ;; esac
    [ "$code" != 0 ] || code=$interrupted # nsys ends with 0 when it is interrupted after the steps to capture
    return "$code"
}

# A wheel's torch that brings a ROCm of its own meets the system's ROCm, which the tool loads first: torch then finds no
# GPU (ROCm/rocprofiler-sdk#66, #93), ends with CONFIGURATION_LOCKED (ROCm/TheRock#6695) or waits forever.
PROBE_SECONDS=${PROBE_SECONDS:-180}
PROBE_SCRIPT='import torch; torch.ones(1, device="cuda").sum().item()'

probe() { # run one kernel under the tool, within PROBE_SECONDS; says what is wrong
    local scratch out cause own options=(profile --trace=cuda --sample=none --cpuctxsw=none)
    scratch=$(mktemp -d) || return
    case $TOOL in
    *rocprofv3) options=(--kernel-trace --output-directory "$scratch" --) ;;
    *) options+=(--output="$scratch/probe") ;;
    esac
    timeout --foreground --kill-after=10 "$PROBE_SECONDS" "$TOOL" "${options[@]}" "$PYTHON" -c "$PROBE_SCRIPT" \
        >"$scratch/out" 2>&1
    code=$?
    out=$(grep -m 1 -E 'CONFIGURATION_LOCKED|No HIP GPUs|^[A-Za-z.]*Error' "$scratch/out")
    rm -rf -- "$scratch"
    [ "$code" != 0 ] && [ "$interrupted" = 0 ] || return 0
    if ! cause=$(hardware_seen "$PYTHON" 2>&1); then
        echo "$cause" >&2 # with or without the tool
        return 1
    fi
    case $code in 124 | 137) out="no answer within $PROBE_SECONDS s (PROBE_SECONDS sets the limit)" ;; esac
    cause="one operation on the GPU fails under ${TOOL##*/}: ${out:-exit code $code}"
    own=''
    if [ "$GPU" = rocm ]; then own=$(packages "$PYTHON" own_rocm); fi
    [ -z "$own" ] || cause+="; torch brings its own ROCm ($own), which clashes with that of $TOOL: run this in a \
container whose torch uses the system's ROCm, such as rocm/pytorch (docs/gpu_nodes.md)"
    echo "error: $cause" >&2
    return 1
}

written() { # FILE: in this run; the folder may hold the profile of an earlier one
    [ -e "$1" ] && [ "$(date -r "$1" +%s)" -ge "$began" ]
}

no_profile() { # fails; wrong flags, exit code 2, have been named
    [ "$code" = 2 ] || echo "error: ${TOOL##*/} wrote no profile: no step to capture was reached on a GPU" >&2
    return 1
}

name_profile() { # PROFILE WHERE_IT_OPENS: fails after an interruption, which an analysis must not delay
    echo "System profile: $1$2"
    [ "$interrupted" = 0 ]
}

analyze() { # PROFILE: ends with our answer
    "$PYTHON" "$HERE/run_pytorch_profiler.py" --analyze-existing "$1" --generate-report --output-dir "$folder" &&
        return
    if [ "$code" = 0 ]; then
        code=1
        if [ "$interrupted" != 0 ]; then code=$interrupted; fi
    fi
}

under_rocprofv3() { # COMMAND...
    local ending option profile='' viewer='' options=(--kernel-trace --memory-copy-trace --hip-runtime-trace --marker-trace)
    # rocpd since ROCm 7.0, which deprecates csv.
    options+=(--output-format "$(first_word_of "$TOOL_HELP" rocpd json csv)")
    # A table of ranges would have a row for each operator.
    if has_word --summary-groups "$TOOL_HELP"; then options+=(--summary-groups KERNEL_DISPATCH --summary-units usec); fi
    # Since ROCm 7.0, only what the training selects; before, the training says what is in the profile.  The tool's own
    # handlers would end the training before that reports an interruption.
    for option in --selected-regions --disable-signal-handlers; do
        if has_word "$option" "$TOOL_HELP"; then options+=("$option"); fi
    done
    "$TOOL" "${options[@]}" --output-directory "$folder" --output-file system_profile -- "$@"
    code=$?
    [ "$code" != 2 ] || return # wrong flags; the tool writes a profile of that, too
    for ending in kernel_trace.csv results.json results.db; do
        if written "$folder/system_profile_$ending"; then profile=$folder/system_profile_$ending; fi
    done
    [ -n "$profile" ] || no_profile || return
    case $profile in *.db) viewer=", opens in ROCm Optiq" ;; esac
    name_profile "$profile" "$viewer" && analyze "$profile"
}

under_nsys() { # COMMAND...
    local profile=$folder/system_profile table
    # Without `stop` it would end the training with the window.  CPU samples need rights that few machines give.
    "$TOOL" profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --capture-range=cudaProfilerApi \
        --capture-range-end=stop --force-overwrite=true --output="$profile" "$@"
    code=$?
    written "$profile.nsys-rep" || no_profile || return
    name_profile "$profile.nsys-rep" ", opens in nsys-ui" || return
    "$TOOL" export --type=sqlite --force-overwrite=true --output="$profile.sqlite" "$profile.nsys-rep" >/dev/null || {
        echo "error: nsys export failed with exit code $?: no analysis of $profile.nsys-rep" >&2
        [ "$code" != 0 ] || code=1
        return
    }
    # In 2022 the reports had other names, and nsys does not fail on an unknown one: ask which names this nsys knows.
    table=$(first_word_of "$("$TOOL" stats --help-reports 2>&1)" cuda_gpu_kern_sum gpukernsum)
    [ -z "$table" ] || "$TOOL" stats --quiet --timeunit usec --report "$table" "$profile.sqlite" ||
        echo "error: nsys stats failed with exit code $?: no table of kernels" >&2
    analyze "$profile.sqlite"
}

wants_help "$@" || choose_tool # before any set-up
WRAPPER=under_profiler
launch tiny_llama_v1.py system_profile --output-dir --system-profiler --num-steps 20 -- "$@"
