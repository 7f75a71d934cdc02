"""One run on fake tensors for all that a prediction asks of a step."""

import pytest

import tiny_llama_v1 as tiny_llama
from analysis.memory.predicted import predicted_memory
from analysis.prediction.operators import operators_of, watch_step
from analysis.work import fake_step
from analysis.work.bytes_moved import step_work

SMALL = "--dry-run --vocab-size 64 --hidden-dim 32 --n-layers 1 --n-heads 4 --seq-len 16"


def workload_of(flags):
    return tiny_llama.resolve(tiny_llama.build_parser().parse_args(flags.split()))[0]


def recorded(workload, on_gpu):
    """All that is asked of a step, as it can be compared."""
    work, memory = step_work(workload, on_gpu), predicted_memory(workload, on_gpu)
    return {
        "allocations": memory.allocations,
        "places": (memory.places, memory.phases),
        "kept": memory.kept,
        "collectives": memory.collectives.calls,
        "operators": operators_of(workload, on_gpu),
        "work": work.table().to_dict("records"),
        "least flops": work.least_flops(),
        "least bytes": (work.minimum(), work.minimum_by_phase()),
    }


@pytest.fixture
def runs(monkeypatch):
    """A list that has an entry for each step on fake tensors."""
    for function in (predicted_memory, step_work, operators_of):
        function.cache_clear()
    ran, step = [], fake_step._fake_step

    def counted(workload, *arguments):
        ran.append(workload)
        return step(workload, *arguments)

    monkeypatch.setattr(fake_step, "_fake_step", counted)
    return ran


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize(
    ("flags", "together", "more"),
    [
        ("--batch-size 4", 1, 0),
        ("--batch-size 4 --gradient-accumulation-steps 2 --attention sdpa", 1, 0),
        ("--batch-size 6 --gradient-accumulation-steps 3", 1, 1),  # memory has all micro-batches
        ("--batch-size 4 --world-size 4 --parallel fsdp", 1, 1),  # work is of one rank
        ("--batch-size 6 --world-size 2 --gradient-accumulation-steps 3", 0, 3),
    ],
)
def test_a_step_watched_once_is_the_one_watched_for_each_question(
    runs, flags, together, more, on_gpu
):
    workload = workload_of(f"{SMALL} {flags}")
    alone = recorded(workload, on_gpu)
    for function in (predicted_memory, step_work, operators_of):
        function.cache_clear()
    runs.clear()
    watch_step(workload, on_gpu)
    assert len(runs) == together
    assert recorded(workload, on_gpu) == alone
    assert len(runs) == together + more


def test_the_last_steps_are_kept(runs):
    workload = workload_of(SMALL)
    steps = [workload.with_settings(batch_size=size) for size in range(2, 11)]  # one too many
    for step in steps[:-1]:
        predicted_memory(step, True)
    predicted_memory(steps[0], True)
    assert len(runs) == 8
    predicted_memory(steps[-1], True)  # in the place of the one that was asked for longest ago
    predicted_memory(steps[0], True)
    assert len(runs) == 9
    predicted_memory(steps[1], True)
    assert len(runs) == 10
