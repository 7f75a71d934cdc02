"""torch.cuda, as a machine with the card would answer."""

from __future__ import annotations

import contextlib
import pickle
import types
from pathlib import Path

import torch

from pretended import clock
from pretended.allocator import Allocator
from pretended.cards import Card, fault, visible_count


class Gpu:
    """The devices of this process, and which is the current one."""

    def __init__(self, card: Card):
        self.card, self.current, self.initialized = card, 0, False
        self.count = visible_count(card)
        self.allocators = [Allocator(card) for _ in range(self.count)]

    def index(self, device=None) -> int:
        index = (
            device
            if isinstance(device, int)
            else None
            if device is None
            else torch.device(device).index
        )
        index = self.current if index is None else index
        if not 0 <= index < self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return index

    def allocator(self, device=None) -> Allocator:
        return self.allocators[self.index(device)]

    def properties(self, device=None) -> types.SimpleNamespace:
        index, card = self.index(device), self.card
        return types.SimpleNamespace(
            name=card.name,
            major=card.capability[0],
            minor=card.capability[1],
            total_memory=card.memory,
            multi_processor_count=card.units,
            gcnArchName=card.arch if card.is_rocm else card.name,
            warp_size=64 if card.is_rocm else 32,
            max_threads_per_multi_processor=2048,
            L2_cache_size=4 * 2**20,
            is_integrated=0,
            is_multi_gpu_board=0,
            pci_domain_id=0,
            pci_bus_id=0x10 + index,
            pci_device_id=0,
            uuid=f"00000000-0000-0000-0000-{index:012d}",
        )


def segment_of(device: int, allocator: Allocator) -> dict:
    """What a snapshot has of a device, as one segment: it keeps no history."""
    allocated, reserved = allocator["allocated_bytes"], allocator["reserved_bytes"]
    blocks = [
        {"size": allocated, "state": "active_allocated"},
        {"size": reserved - allocated, "state": "inactive"},
    ]
    return {"device": device, "address": 0, "total_size": reserved, "blocks": blocks}


def make_graphed_callables(module, sample_args, num_warmup_iters: int = 3):
    """The module, whose calls count as replays of a graph, in `replays`; of inputs of another shape
    there is none."""
    shapes, forward = [tensor.shape for tensor in sample_args], module.forward
    for _ in range(num_warmup_iters + 1):  # the last one is the capture
        loss = module(*sample_args)
        torch.autograd.grad(loss, [p for p in module.parameters() if p.requires_grad])
    module.replays = 0

    def replay(*inputs):
        if [tensor.shape for tensor in inputs] != shapes:
            raise RuntimeError("a CUDA graph is replayed with the shapes that it was captured with")
        module.replays += 1
        return forward(*inputs)

    module.forward = replay
    return module


def install(card: Card) -> Gpu:
    gpu, cuda = Gpu(card), torch.cuda

    def initialize() -> None:
        gpu.initialized = True

    def device_count() -> int:
        counted_early = fault("count_before_init") and not gpu.initialized  # pytorch#186516
        return 0 if counted_early else gpu.count

    def set_device(device) -> None:
        gpu.current = gpu.index(device)

    def synchronize(device=None) -> None:
        clock.CLOCK.wait(clock.CLOCK.done_at, "DeviceSynchronize")

    def stat(kind: str, which: str):
        return lambda device=None: gpu.allocator(device).counts[kind][which]

    replaced = {
        "_lazy_init": initialize,
        "init": initialize,
        "is_initialized": lambda: gpu.initialized,
        "is_available": lambda: gpu.count > 0,
        "device_count": device_count,
        "current_device": lambda: gpu.current,
        "set_device": set_device,
        "get_device_properties": gpu.properties,
        "get_device_name": lambda device=None: gpu.properties(device).name,
        "get_device_capability": lambda device=None: card.capability,
        "get_arch_list": lambda: [],  # as of a CPU build
        "is_current_stream_capturing": lambda: False,  # a CUDA build would ask its driver
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),  # it computes on the CPU
        "set_rng_state": lambda state, device=None: None,
        "synchronize": synchronize,
        "Event": clock.Event,
        "Stream": clock.Stream,
        "current_stream": clock.Stream,
        "default_stream": clock.Stream,
        "stream": contextlib.nullcontext,
        "utilization": lambda device=None: 50,
        "make_graphed_callables": make_graphed_callables,
    }
    memory = {
        "memory_allocated": stat("allocated_bytes", "current"),
        "max_memory_allocated": stat("allocated_bytes", "peak"),
        "memory_reserved": stat("reserved_bytes", "current"),
        "max_memory_reserved": stat("reserved_bytes", "peak"),
        "memory_stats": lambda device=None: gpu.allocator(device).stats(),
        "mem_get_info": lambda device=None: (gpu.allocator(device).free, card.memory),
        "reset_peak_memory_stats": lambda device=None: gpu.allocator(device).reset_peaks(),
        "empty_cache": lambda: [allocator.empty_cache() for allocator in gpu.allocators],
        "_record_memory_history": lambda *args, **kwargs: None,
        "_snapshot": lambda device=None: {
            "segments": [segment_of(*numbered) for numbered in enumerate(gpu.allocators)],
            "device_traces": [[] for _ in gpu.allocators],
        },
        "_dump_snapshot": lambda path: Path(path).write_bytes(
            pickle.dumps(cuda.memory._snapshot())
        ),
    }
    for module, functions in ((cuda, replaced | memory), (cuda.memory, memory)):
        for name, function in functions.items():
            setattr(module, name, function)
    torch.accelerator.current_accelerator = lambda check_available=False: (
        None
    )  # a CUDA build would ask its driver
    for name in ("range_push", "mark"):
        setattr(cuda.nvtx, name, lambda text: 0)
    cuda.nvtx.range_pop = lambda: 0
    cuda.profiler.start = cuda.profiler.stop = lambda: None
    torch.version.hip = "7.0.51831" if card.is_rocm else None
    torch.version.cuda = None if card.is_rocm else "12.8"
    return gpu
