"""Small traces at random, for hypothesis: what programs, profilers and accidents leave in a
file."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st
from traces import H100_PROPERTIES, event, write_trace

OPERATORS = (
    "aten::mm", "aten::add", "aten::empty", "aten::view", "aten::_softmax", "aten::conv2d",
    "aten::copy_", "c10d::allreduce_", "autograd::engine::evaluate_function: MmBackward0",
    "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
    "Torch-Compiled Region: 0/0",
)  # fmt: skip
RANGES = (
    "forward", "backward", "optimizer", "data", "attention.scores", "final_norm",
    "Optimizer.step#AdamW.step", "enumerate(DataLoader)#_Iter.__next__", "gloo:all_reduce",
    "nccl:all_reduce", "FSDP::all_gather (layers.3)", "nn.Module: Linear_0",
)  # fmt: skip
CALLS = {  # and the category and name of what each starts on the GPU, if that
    "cudaLaunchKernel": (
        "kernel",
        ("gemm", "softmax", "ncclDevKernel_AllReduce_Sum_f32", "multimem_all_reduce_kernel"),
    ),
    "cudaGraphLaunch": ("kernel", ("nvjet_tst", "triton_poi_fused_add")),
    "cudaMemcpyAsync": (
        "gpu_memcpy",
        ("Memcpy DtoH (Device -> Pageable)", "Memcpy HtoD (Pinned -> Device)"),
    ),
    "hipMemcpyWithStream": ("gpu_memcpy", ("Memcpy DtoD (Device -> Device)",)),
    "cudaMemsetAsync": ("gpu_memset", ("Memset (Device)",)),
    "cudaStreamSynchronize": None,
    "cudaMalloc": None,
}
SHAPES = (None, [[8, 8], [8, 8]], [[4096, 4096], [4096, 4096]], [[0, 8], [8, 0]], [[]])
WORK = ("compute", "compute", "compute", "data", "optimizer", "collective", "wait", "pause")


def times(longest: int) -> st.SearchStrategy:
    """A start and a duration in us; many events begin, end, or are empty at the same times."""
    return st.tuples(st.integers(0, 40), st.sampled_from((0, 1, 2, 3, 5, 8, 13, 21, 34))).map(
        lambda pair: tuple(one * longest / 40 for one in pair)
    )


@st.composite
def accidents(draw, on_gpu: bool) -> list[dict]:
    """Steps that may be absent, empty, overlap or be apart; operators, ranges, calls and GPU events
    on several threads, streams and devices; events without their caller, call, or kernel; clocks
    that are off."""
    longest = draw(st.sampled_from((40.0, 400.0, 20_000.0)))
    when, thread = times(longest), st.sampled_from((1, 1, 2, 3))
    events = [
        event(f"ProfilerStep#{number}", *draw(when), "user_annotation")
        for number in range(1, 1 + draw(st.sampled_from((0, 1, 2, 3, 4))))
    ]
    if events and draw(st.booleans()):  # one after the other, as usual
        for i, one in enumerate(events):
            one |= {"ts": i * longest / len(events), "dur": longest / len(events)}
    for i in range(draw(st.integers(1, 8))):
        name, shapes = draw(st.sampled_from(OPERATORS)), draw(st.sampled_from(SHAPES))
        arguments = {"External id": i + 1, "Sequence number": draw(st.sampled_from((-1, 1, 2)))}
        if shapes:
            arguments |= {"Input Dims": shapes, "Input type": ["float"] * len(shapes)}
        events.append(event(name, *draw(when), thread=draw(thread), **arguments))
        if "allreduce" in name and draw(st.booleans()):
            noted = {
                "Collective name": "allreduce",
                "In msg nelems": 64,
                "Out msg nelems": 64,
                "dtype": "Float",
            }
            noted |= {"Group size": 2, "Process Group Name": "0", "External id": i + 100}
            events.append(events[-1] | {"name": "record_param_comms", "args": noted})
    for name in draw(st.lists(st.sampled_from(RANGES), max_size=6)):
        kind = "python_function" if name.startswith("nn.Module") else "user_annotation"
        events.append(event(name, *draw(when), kind, draw(thread)))
    for i in range(draw(st.integers(0, 8)) if on_gpu else 0):
        events += draw(launches(longest, i + 1, when, thread))
    return draw(st.permutations(events))


@st.composite
def programs(draw, on_gpu: bool) -> list[dict]:
    """Steps one after the other that fetch data, compute, communicate and update weights; the GPU
    runs behind, in the order of the launches."""
    events, now, free = [], 0.0, {7: 0.0, 13: 0.0}  # us, of the host and of each stream
    long = st.sampled_from((1, 2, 5, 20, 150, 2000))
    for number in range(1, 1 + draw(st.integers(1, 3))):
        begin = now
        for _ in range(draw(st.integers(1, 4))):
            kind, start, name = draw(st.sampled_from(WORK)), now, draw(st.sampled_from(OPERATORS))
            now += draw(long)
            if kind == "wait" and on_gpu:
                until = max(now, *free.values())
                events.append(
                    event(
                        "cudaStreamSynchronize",
                        now,
                        until - now,
                        "cuda_runtime",
                        correlation=900 + number,
                    )
                )
                now = until + draw(long)
            elif kind in ("compute", "optimizer"):
                number_of_call, i = len(events) + 1, draw(st.integers(0, 3))
                inner = event(
                    name, now, 4, **{"External id": number_of_call, "Sequence number": len(events)}
                )
                if draw(st.booleans()):
                    inner["args"] |= {
                        "Input Dims": draw(
                            st.sampled_from(([[64, 64], [64, 64]], [[4096, 4096], [4096, 4096]]))
                        ),
                        "Input type": ["float"] * 2,
                    }
                events.append(inner)
                if on_gpu:
                    call, (category, names) = list(CALLS.items())[i]
                    stream, lasts = draw(st.sampled_from((7, 7, 13))), draw(long)
                    began = max(now + 3, free[stream]) + draw(st.sampled_from((0, 1, 300)))
                    free[stream] = began + lasts
                    where = {"correlation": number_of_call, "device": 0, "stream": stream}
                    events.append(
                        event(call, now + 1, 2, "cuda_runtime", correlation=number_of_call)
                    )
                    events.append(
                        event(draw(st.sampled_from(names)), began, lasts, category, **where)
                    )
                else:
                    inner["dur"] += draw(long)
                now += inner["dur"]
            elif kind == "collective" and not on_gpu:
                lasts = draw(long)
                events.append(
                    event("c10d::allreduce_", now, 1, **{"External id": 500 + len(events)})
                )
                events.append(event("gloo:all_reduce", now + 1, lasts, "user_annotation", thread=2))
                now += 1 + draw(st.sampled_from((0.0, 0.5, 1.0))) * lasts
            if kind in ("data", "optimizer"):
                events.append(event(kind, start, now - start, "user_annotation"))
        events.append(event(f"ProfilerStep#{number}", begin, now - begin, "user_annotation"))
    return events


@st.composite
def launches(draw, longest: float, number: int, when, thread) -> list[dict]:
    """A call and what it starts on the GPU; either may be absent."""
    name = draw(st.sampled_from([*CALLS]))
    start, duration = draw(when)
    call = event(name, start, duration / 10, "cuda_runtime", draw(thread), correlation=number)
    if not CALLS[name]:
        return [call]
    kind, names = CALLS[name]
    where = {
        "device": draw(st.sampled_from((0, 0, 0, 1))),
        "stream": draw(st.sampled_from((7, 7, 13))),
    }
    after, lasts = draw(when)
    skew = draw(st.sampled_from((0, 0, 0, 1, -1)))
    began = start + (0 if skew == 0 else skew * after) + duration / 10
    kernel = event(
        draw(st.sampled_from(names)), began, lasts / 4, kind, correlation=number, **where
    )
    return draw(st.sampled_from(([call, kernel], [call, kernel], [call, kernel], [call], [kernel])))


@st.composite
def traces(draw, on_gpu: bool, **metadata) -> dict:
    """One trace, of a program or of accidents alone."""
    device = draw(st.sampled_from(({}, H100_PROPERTIES)))
    return {
        "traceEvents": draw(st.one_of(programs(on_gpu), accidents(on_gpu))),
        **device,
        **metadata,
    }


@st.composite
def runs(draw) -> list[dict]:
    """The traces of one rank, or of several."""
    n = draw(st.sampled_from((1, 1, 1, 2, 3)))
    on_gpu = draw(st.booleans())
    ranks = [
        {"distributedInfo": {"rank": rank, "world_size": n}} if n > 1 else {} for rank in range(n)
    ]
    return [draw(traces(on_gpu, **one)) for one in ranks]


def write_run(folder: Path, run: list[dict]) -> list[Path]:
    return [
        write_trace(
            folder / f"trace_{i}.json",
            *one["traceEvents"],
            **{k: one[k] for k in one if k != "traceEvents"},
        )
        for i, one in enumerate(run)
    ]
