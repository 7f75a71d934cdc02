"""What holds the memory of a process: tensors by category and part of the model,
each storage once."""

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator

import torch
from torch.utils._pytree import tree_leaves

LARGEST = 10


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "DefaultCPUAllocator" in str(error)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor in shards."""
    return getattr(tensor, "_local_tensor", tensor)


def stored(value: object) -> Iterator[torch.Tensor]:
    """The tensors with a storage that this one is made of:
    shards and quantized values are of subclasses."""
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten:
        names, _ = flatten()
        for name in names:
            yield from stored(getattr(value, name))
    elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
        yield value


def objects(kind: type) -> list:
    """All of a kind that Python's garbage collector knows, also what the program has
    set aside by gc.freeze()."""
    with nothing_frozen():
        # Not isinstance(), which asks proxies for their class.
        return [value for value in gc.get_objects() if issubclass(type(value), kind)]


# Not in a whole run that is watched: what is garbage by then would be set aside with the rest, and
# never be collected.
looks_at_frozen = True


@contextlib.contextmanager
def nothing_frozen() -> Iterator[None]:
    """In this block, the collector knows what the program has set aside, too."""
    was_frozen = looks_at_frozen and gc.get_freeze_count() > 0
    if was_frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if was_frozen:
            gc.freeze()


class Holdings:
    """Bytes by category and part of the model; of each storage once, in the category that is
    counted first."""

    def __init__(self):
        self.bytes: Counter = Counter()
        self.seen: set[int] = set()  # storages

    def add(self, value: object, category: str, part: str) -> None:
        for tensor in stored(value):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.bytes[category, part] += storage.nbytes()

    def rows(self) -> list[dict]:
        return [
            {"category": category, "part": part, "bytes": size}
            for (category, part), size in self.bytes.items()
        ]


def what_holds_memory(watch, error: str | None = None) -> dict:
    """rows of {category, part, bytes}; the allocator's peak, in bytes, on a GPU; with an error, the
    largest tensors, which the frames of the traceback still hold."""
    on_gpu = torch.cuda.is_initialized()
    memory = {
        "rows": holdings_of(watch).rows(),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }
    if error:
        memory["error"] = error.partition("\n")[0]
        memory["allocated_bytes"] = torch.cuda.memory_allocated() if on_gpu else None
        memory["peak_before_bytes"] = watch.peak_bytes
        memory["largest"] = largest_tensors()
    return memory


def holdings_of(watch) -> Holdings:
    """What the program's models and optimizers hold."""
    modules, holdings = watch.modules, Holdings()
    if not modules.names:
        modules.name_all()
    part_of = {}  # by id of the parameter
    for name, p, owned in modules.parameters():
        part = name.rpartition(".")[0]
        part_of[id(p)] = part
        holdings.add(p, "parameters" if owned and p.requires_grad else "frozen", part)
        holdings.add(p.grad, "gradients", part)
    add_optimizers(holdings, part_of)
    for module, name in modules.names.items():
        for p in module._parameters.values():
            holdings.add(p, "frozen", name)
            holdings.add(getattr(p, "grad", None), "gradients", name)
        for value in module._buffers.values():
            holdings.add(value, "buffers", name)
    modules.forget()
    return holdings


def add_optimizers(holdings: Holdings, part_of: dict[int, str]) -> None:
    """What all optimizers keep of parameters, also those that another one steps, as ZeRO does.
    part_of: parts by id of the parameter."""
    for optimizer in objects(torch.optim.Optimizer):
        for p, state in getattr(optimizer, "state", {}).items():
            for value in tree_leaves(state):
                holdings.add(value, "optimizer", part_of.get(id(p), ""))


def largest_tensors() -> list[dict]:
    """Of all that are there, each storage once: {shape, dtype, bytes}, the largest first."""
    by_storage = {}
    for tensor in objects(torch.Tensor):
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if is_plain and tensor.layout is torch.strided:
            by_storage[tensor.untyped_storage()._cdata] = tensor
    rows = []
    for tensor in by_storage.values():
        size = tensor.untyped_storage().nbytes()
        rows.append({"shape": [*tensor.shape], "dtype": str(tensor.dtype), "bytes": size})
    rows.sort(key=lambda row: -row["bytes"])
    return rows[:LARGEST]
