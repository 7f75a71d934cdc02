"""What the caching allocator reserves: its rules on hand-made sequences, and on a GPU against the
allocator itself."""

import random

import pytest
import torch
from traces import answers_in

import tiny_llama_v1 as tiny_llama
from analysis.memory.allocator import CachingAllocator, reserved_bytes
from analysis.memory.predicted import predicted_memory
from analysis.prediction.capacity import capacity_elsewhere
from analysis.prediction.document import Prediction, memory_prediction
from analysis.prediction.search import LargestSizes
from analysis.prediction.text import fit_facts, how_to_fit
from harness.base.units import MB
from harness.instruments.memory_timeline import Allocation, Phase, StepMemory
from studies.engine.isolation import run_in_subprocess_if_gpu


@pytest.mark.parametrize(
    ("sizes", "reserved_mb", "expandable_mb"),
    [
        ([1], 2, 2),
        ([MB] * 2, 2, 2),  # small ones share segments of 2 MB
        ([MB] * 3, 4, 4),
        ([MB + 1], 20, 20),  # larger ones segments of 20 MB,
        ([MB + 1, 18 * MB], 20, 20),  # in which 19 MB - 512 bytes are left
        ([MB + 1, 19 * MB], 40, 40),
        ([MB + 1, 9 * MB, 9 * MB], 20, 20),
        ([10 * MB - 512] * 2, 20, 20),
        ([10 * MB], 10, 20),  # from 10 MB on of its own size,
        ([10 * MB + 1], 12, 20),  # in multiples of 2 MB
        ([9.5 * MB, 9.5 * MB, 2 * MB], 40, 40),  # what is left of the first, 1 MB, is too small
        ([21 * MB, 19 * MB], 42, 40),  # 1 MB of the first segment is lost
        ([512 * MB, MB], 514, 522),
    ],
)
def test_segments_follow_the_sizes(sizes, reserved_mb, expandable_mb):
    for expandable, expected in ((False, reserved_mb), (True, expandable_mb)):
        allocator = CachingAllocator(expandable)
        for size in sizes:
            allocator.allocate(int(size))
        assert allocator.reserved == expected * MB, expandable


def test_the_smallest_block_that_has_room_is_taken():
    allocator = CachingAllocator()
    large, small = (allocator.allocate(size * MB) for size in (30, 12))
    large.pool.release(large)
    small.pool.release(small)
    assert allocator.allocate(12 * MB) is small
    # What is left of a block, 30 - 28 MB, is split off; 1 MB would stay with it.
    first = allocator.allocate(28 * MB)
    assert (first is large, first.size, first.next.size) == (True, 28 * MB, 2 * MB)
    first.pool.release(first)
    assert (allocator.allocate(29 * MB).size, allocator.reserved) == (30 * MB, 42 * MB)


@pytest.mark.parametrize("expandable", [False, True])
def test_free_neighbors_become_one_block(expandable):
    allocator = CachingAllocator(expandable)
    blocks = [allocator.allocate(5 * MB) for _ in range(4)]
    for block in (blocks[0], blocks[2], blocks[1]):
        block.pool.release(block)
    assert [entry[:2] for entry in blocks[0].pool.free] == [(15 * MB, 0)]
    assert (allocator.allocate(14 * MB) is blocks[0], allocator.reserved) == (True, 20 * MB)


def test_a_stream_does_not_take_what_is_free_in_another():
    allocator = CachingAllocator()
    block = allocator.allocate(100 * MB, 0)
    block.pool.release(block)
    allocator.allocate(100 * MB, 1)
    assert allocator.reserved == 200 * MB
    allocator.allocate(100 * MB, 0)
    assert allocator.reserved == 200 * MB


def test_only_segments_that_do_not_grow_lose_what_does_not_match():
    """Of 30 free MB, 25 are taken and 5 are too few for the next: the segment that grows adds what
    is missing."""
    reserved = []
    for expandable in (False, True):
        allocator = CachingAllocator(expandable)
        block = allocator.allocate(30 * MB)
        block.pool.release(block)
        allocator.allocate(25 * MB)
        allocator.allocate(15 * MB)
        reserved.append(allocator.reserved / MB)
    assert reserved == [30 + 16, 40]


def step_of(*allocations: tuple) -> StepMemory:
    """megabytes, category, born, died, stream"""
    made = [
        Allocation(mb * MB, [mb * MB], "uint8", "", None, name, *times)
        for mb, name, *times in allocations
    ]
    return StepMemory(
        1, made, places=[""] * 20, phases=[Phase("forward", 1, 5), Phase("optimizer", 10, 19)]
    )


def test_a_replay_knows_the_first_step_and_the_streams():
    parameters = (40, "parameters", 0, None)
    activation, gradient = (30, "activations", 2, 8), (30, "gradients", 7, 15)
    assert reserved_bytes(step_of(parameters, activation, gradient)) == 100 * MB
    # The state is allocated in the first optimizer's phase, where the activation was.
    assert (
        reserved_bytes(step_of(parameters, activation, gradient, (30, "optimizer", 0, None)))
        == 130 * MB
    )
    assert reserved_bytes(step_of(parameters, activation, (30, "gradients", 9, 15))) == 70 * MB
    assert reserved_bytes(step_of(parameters, activation, (30, "gradients", 9, 15, 1))) == 100 * MB
    assert reserved_bytes(step_of(parameters, activation), [32 * MB, 32 * MB]) == 134 * MB


SMALL = "--hidden-dim 256 --n-layers 1 --batch-size 4 --seq-len 256 --vocab-size 4000"
# Of what is not looked at, the largest sizes that fit.
NO_SEARCH = ("analysis.prediction.document.largest_sizes", lambda *arguments: LargestSizes(7, 77))


def resolved(flags: str):
    return tiny_llama.resolve(tiny_llama.build_parser().parse_args(flags.split()))[0]


@pytest.mark.slow
def test_fsdp_reserves_for_each_of_its_streams():
    memory = predicted_memory(resolved(f"--dry-run --world-size 4 --parallel fsdp {SMALL}"), True)
    streams = {one.stream for one in memory.allocations}
    assert len(streams) >= 3  # the default one, that of the copies into gathers, that of reductions
    in_one = reserved_bytes(memory)
    for one in memory.allocations:
        one.stream = 0
    assert reserved_bytes(memory) < in_one
    predicted_memory.cache_clear()
    assert {
        one.stream for one in predicted_memory(resolved(f"--dry-run {SMALL}"), True).allocations
    } == {0}


@pytest.mark.slow
@pytest.mark.parametrize("short_mb", [-1, 1])
def test_what_fits_is_judged_by_what_is_reserved(short_mb, monkeypatch):
    """A device that has 1 MB more than is reserved, or 1 MB less: more than is live either way."""
    workload = resolved(f"--dry-run {SMALL}")
    with monkeypatch.context() as patched:
        patched.setattr(*NO_SEARCH)
        before = memory_prediction(workload, torch.device("cpu"), capacity_elsewhere(2**40))
    reserved, live = before.reserved_memory_mb, before.peak_memory_mb
    assert live < reserved
    overhead = before.in_use_mb + before.reserve_mb
    capacity = capacity_elsewhere(int((reserved + overhead - short_mb) * MB))
    document = memory_prediction(workload, torch.device("cpu"), capacity).as_json()
    assert document["fits"] is (short_mb < 0)
    assert document["margin_mb"] == pytest.approx(-short_mb)
    assert (document["max_batch_size"] >= 4) is (short_mb < 0)
    line = fit_facts(answers_in(document, Prediction))["Fits"]
    assert f"{reserved:,.1f} MB of {reserved - short_mb:,.1f} MB reserved, 1 MB" in line
    if short_mb > 0 and document["reserved_memory_expandable_mb"] < reserved - 1:
        assert "expandable_segments:True" in how_to_fit(answers_in(document, Prediction))


@pytest.mark.slow
def test_a_cpu_reserves_nothing(monkeypatch):
    monkeypatch.setattr(*NO_SEARCH)
    document = memory_prediction(resolved(f"--dry-run {SMALL}"), torch.device("cpu")).as_json()
    assert document["reserved_memory_mb"] is None
    assert "no caching allocator" in document["reserved_memory_mb_reason"]


def reserved_on_a_gpu_and_by_our_allocator() -> list[tuple[int, int]]:
    """Bytes after each of 2,000 allocations and frees."""
    chance, allocator, held, pairs = random.Random(0), CachingAllocator(), [], []
    before = torch.cuda.memory_reserved()
    for _ in range(2000):
        if held and chance.random() < 0.5:
            tensor, block = held.pop(chance.randrange(len(held)))
            del tensor
            block.pool.release(block)
        else:
            size = int(2 ** chance.uniform(0, 26))
            tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            held.append((tensor, allocator.allocate(size)))
        pairs.append((torch.cuda.memory_reserved() - before, allocator.reserved))
    return pairs


@pytest.mark.gpu
def test_the_allocator_of_a_gpu_reserves_the_same():
    """In a process of its own: in this one, what other tests have left has room for some of it."""
    for on_gpu, by_ours in run_in_subprocess_if_gpu(True, reserved_on_a_gpu_and_by_our_allocator):
        assert on_gpu == by_ours
