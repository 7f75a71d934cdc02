#!/usr/bin/env bash
# Train 20 steps under rocprofv3 (ROCm) or nsys (CUDA), five of them captured with the marker ranges of the model's
# parts and phases, and print the tool's summaries by range and by kernel, into system_profile_<timestamp>/.
#   ./run_system_profiler.sh [flags of tiny_llama_v1.py]
#   ./run_system_profiler.sh --warmup-steps 10 --profile-steps 2     capture steps 11 and 12
# shellcheck disable=SC2034,SC2317,SC2329 # WRAPPER is read by launch, which calls under_profiler
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/launcher_common.sh" || exit 1

GET_ROCPROFV3="rocprofv3, of ROCm 7.0 or newer (apt install rocprofiler-sdk)"
GET_NSYS="nsys, of NVIDIA Nsight Systems (apt install nsight-systems-cli)"

find_tool() { # rocprofv3 | nsys: its path, also where ROCm and CUDA leave it off PATH
    command -v "$1" && return
    case $1 in
    rocprofv3) set -- "${ROCM_PATH:-/opt/rocm}/bin/rocprofv3" ;;
    nsys) set -- "${CUDA_HOME:-/usr/local/cuda}/bin/nsys" ;;
    esac
    [ -x "$1" ] && echo "$1"
}

choose_tool() { # sets GPU, TOOL and TOOL_HELP; a tool sees the GPUs of its own vendor alone
    read -r GPU _ <<<"$(accelerator)"
    case $GPU in
    rocm) TOOL=$(find_tool rocprofv3) || die "this AMD GPU needs $GET_ROCPROFV3, on PATH" ;;
    cuda) TOOL=$(find_tool nsys) || die "this NVIDIA GPU needs $GET_NSYS, on PATH" ;;
    cpu) # also a container in which the driver does not show itself: torch may see more
        TOOL=$(find_tool nsys || find_tool rocprofv3) ||
            die "no system profiler on PATH: an AMD GPU needs $GET_ROCPROFV3; an NVIDIA GPU needs $GET_NSYS"
        ;;
    esac
    case $TOOL in
    *rocprofv3)
        TOOL_HELP=$("$TOOL" --help 2>&1)
        has_word --selected-regions "$TOOL_HELP" ||
            die "$TOOL cannot be limited to chosen steps (--selected-regions): install $GET_ROCPROFV3"
        ;;
    esac
}

has_word() { grep -qw -e "$1" <<<"$2"; } # WORD TEXT

first_word_of() { # TEXT WORD...: the first of the words that the text has, or none
    local word
    for word in "${@:2}"; do
        if has_word "$word" "$1"; then
            echo "$word"
            return
        fi
    done
}

# What follows runs as the job of run_logged.  A signal also reaches the tool and the training, which report and end;
# the traps keep this shell alive for the summary.  The exit code is that of the training, not of the summary.

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
OWN_ROCM_SCRIPT='
import glob, importlib.util, os
folder = os.path.dirname(importlib.util.find_spec("torch").origin)
own = importlib.util.find_spec("_rocm_sdk_core")
print(*(glob.glob(folder + "/lib/libamdhip64.so*") or (own.submodule_search_locations if own else []))[:1])
'

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
    own=$(case $GPU in rocm) "$PYTHON" -c "$OWN_ROCM_SCRIPT" ;; esac)
    cause="one operation on the GPU fails under ${TOOL##*/}: ${out:-exit code $code}"
    [ -z "$own" ] || cause+="; torch brings its own ROCm ($own), which clashes with that of $TOOL: run this in a \
container whose torch uses the system's ROCm, such as rocm/pytorch (docs/gpu_nodes.md)"
    echo "error: $cause" >&2
    return 1
}

written() { # FILE: in this run; the folder may hold the profile of an earlier one
    [ -e "$1" ] && [ "$(date -r "$1" +%s)" -ge "$began" ]
}

no_profile() { # wrong flags, exit code 2, have been named
    [ "$code" = 2 ] || echo "error: ${TOOL##*/} wrote no profile: no step to capture was reached on a GPU" >&2
}

under_rocprofv3() { # COMMAND...: prints its summaries itself, a table for the ranges and one for the kernels
    local file profile='' options=(--selected-regions --marker-trace --kernel-trace --memory-copy-trace)
    options+=(--stats --summary-per-domain --summary-units usec --output-format csv pftrace)
    # Its own handlers would end the training before that reports the interruption.
    if has_word --disable-signal-handlers "$TOOL_HELP"; then options+=(--disable-signal-handlers); fi
    "$TOOL" "${options[@]}" --output-directory "$folder" --output-file system_profile -- "$@"
    code=$?
    for file in "$folder"/system_profile*.pftrace; do
        if written "$file"; then profile=$file; fi
    done
    if [ -z "$profile" ]; then
        no_profile
        return
    fi
    echo "System profile: $profile, opens at https://ui.perfetto.dev; the tables as .csv beside it"
}

under_nsys() { # COMMAND...
    local profile=$folder/system_profile.nsys-rep listed name names=() failed
    # Without `stop` it would end the training with the window.  CPU samples need rights that few machines give.
    "$TOOL" profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --capture-range=cudaProfilerApi \
        --capture-range-end=stop --force-overwrite=true --output="$folder/system_profile" "$@"
    code=$?
    if ! written "$profile"; then
        no_profile
        return
    fi
    # In 2022 the reports had other names, and nsys does not fail on an unknown one: ask which names this nsys knows.
    listed=$("$TOOL" stats --help-reports 2>&1)
    for name in "$(first_word_of "$listed" nvtx_pushpop_sum nvtxppsum)" \
        "$(first_word_of "$listed" nvtx_gpu_proj_sum)" \
        "$(first_word_of "$listed" cuda_gpu_kern_sum gpukernsum)"; do
        [ -z "$name" ] || names+=(--report "$name")
    done
    "$TOOL" stats --quiet --force-export=true --timeunit usec ${names[@]+"${names[@]}"} "$profile"
    failed=$?
    [ "$failed" = 0 ] || echo "error: nsys stats failed with exit code $failed: no summary of $profile" >&2
    echo "System profile: $profile, opens in nsys-ui"
}

wants_help "$@" || choose_tool # before any set-up
WRAPPER=under_profiler
launch tiny_llama_v1.py system_profile --output-dir --system-profiler --num-steps 20 -- "$@"
