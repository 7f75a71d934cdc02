"""What holds the memory of a process: tensors by category and part of the model, each storage once."""

from __future__ import annotations

import gc
from collections import Counter

import torch

LARGEST = 10


def ran_out(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in text


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor in shards."""
    return getattr(tensor, "_local_tensor", tensor)


def what_holds_memory(watch, error: str | None = None) -> dict:
    """rows of {category, part, bytes}; the allocator's peak, in bytes, on a GPU; with an error, the largest tensors,
    which the frames of the traceback still hold."""
    sizes, seen = Counter(), set()
    if not watch.modules.names:
        watch.modules.name_all()

    def count(tensor: torch.Tensor, category: str, part: str) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return
        storage = local(tensor).untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            sizes[category, part] += storage.nbytes()

    for name, p, owned in watch.modules.parameters():
        part = name.rpartition(".")[0]
        count(p, "parameters" if owned and p.requires_grad else "frozen", part)
        count(p.grad, "gradients", part)
        for optimizer in watch.order:
            for value in optimizer.state.get(p, {}).values():
                count(value, "optimizer", part)
    for module, name in watch.modules.names.items():
        for value in module._parameters.values():
            count(value, "frozen", name)
        for value in module._buffers.values():
            count(value, "buffers", name)
    rows = [{"category": category, "part": part, "bytes": size} for (category, part), size in sizes.items()]
    on_gpu = torch.cuda.is_initialized()
    found = {"rows": rows, "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None}
    if error:
        others = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
        others = {t.untyped_storage()._cdata: t for t in others if t.layout is torch.strided}
        largest = sorted(others.values(), key=lambda t: -t.untyped_storage().nbytes())[:LARGEST]
        found["error"] = error.partition("\n")[0]
        found["allocated_bytes"] = torch.cuda.memory_allocated() if on_gpu else None
        found["largest"] = [
            {"shape": [*t.shape], "dtype": str(t.dtype), "bytes": t.untyped_storage().nbytes()} for t in largest
        ]
    return found
