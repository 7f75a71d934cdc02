"""What holds the memory of a process: tensors by category and part of the model,
each storage once."""

import gc
from collections import Counter
from collections.abc import Iterator

import torch
from torch.utils._pytree import tree_leaves

LARGEST = 10


def ran_out(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in text


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor in shards."""
    return getattr(tensor, "_local_tensor", tensor)


def stored(value: object) -> Iterator[torch.Tensor]:
    """The tensors with a storage that this one is made of:
    shards and quantized values are of subclasses."""
    if flatten := getattr(value, "__tensor_flatten__", None):
        for name in flatten()[0]:
            yield from stored(getattr(value, name))
    elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
        yield value


def objects(kind: type) -> list:
    """All of a kind that Python's garbage collector knows, also what the program has
    set aside by gc.freeze()."""
    if frozen := gc.get_freeze_count():
        gc.unfreeze()
    found = [one for one in gc.get_objects() if issubclass(type(one), kind)]
    if frozen:
        gc.freeze()
    return found


def what_holds_memory(watch, error: str | None = None) -> dict:
    """rows of {category, part, bytes}; the allocator's peak, in bytes, on a GPU; with an error, the
    largest tensors, which the frames of the traceback still hold."""
    sizes, seen, parts = Counter(), set(), {}
    if not watch.modules.names:
        watch.modules.name_all()

    def count(value: object, category: str, part: str) -> None:
        for tensor in stored(value):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                sizes[category, part] += storage.nbytes()

    for name, p, owned in watch.modules.parameters():
        parts[id(p)] = part = name.rpartition(".")[0]
        count(p, "parameters" if owned and p.requires_grad else "frozen", part)
        count(p.grad, "gradients", part)
    for optimizer in objects(
        torch.optim.Optimizer
    ):  # also those that another one steps, as ZeRO does
        for p, state in getattr(optimizer, "state", {}).items():
            for value in tree_leaves(state):
                count(value, "optimizer", parts.get(id(p), ""))
    for module, name in watch.modules.names.items():
        for p in module._parameters.values():
            count(p, "frozen", name)
            count(getattr(p, "grad", None), "gradients", name)
        for value in module._buffers.values():
            count(value, "buffers", name)
    watch.modules.forget()
    rows = [
        {"category": category, "part": part, "bytes": size}
        for (category, part), size in sizes.items()
    ]
    on_gpu = torch.cuda.is_initialized()
    found = {"rows": rows, "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None}
    if error:
        others = [
            one for one in objects(torch.Tensor) if type(one) in (torch.Tensor, torch.nn.Parameter)
        ]
        others = {t.untyped_storage()._cdata: t for t in others if t.layout is torch.strided}
        largest = sorted(others.values(), key=lambda t: -t.untyped_storage().nbytes())[:LARGEST]
        found["error"] = error.partition("\n")[0]
        found["allocated_bytes"] = torch.cuda.memory_allocated() if on_gpu else None
        found["peak_before_bytes"] = watch.peak_bytes
        found["largest"] = [
            {"shape": [*t.shape], "dtype": str(t.dtype), "bytes": t.untyped_storage().nbytes()}
            for t in largest
        ]
    return found
