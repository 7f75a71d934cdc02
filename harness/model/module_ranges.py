"""Named ranges for any model: each nn.Module's forward pass by its path, such as
transformer.h.3.attn."""

from collections.abc import Iterator

from torch import nn

from harness.base.ranges import trace_range


class ModuleRanges:
    """Hooks that name the modules of a model for whatever observes a step; there are none in other
    steps."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._hooks: list = []
        self._open: list = []  # ranges that are entered, the innermost one last

    def follow(self, observed: bool) -> None:
        """Put the hooks in place before a step that is observed, and remove them before one that is
        not."""
        if observed == bool(self._hooks):
            return
        if not observed:
            self.remove()
            return
        for path, module in self.model.named_modules():
            name = path or type(module).__name__
            self._hooks.append(module.register_forward_pre_hook(self._entering(name), prepend=True))
            # Also after an exception: recomputing a checkpointed block ends with one.
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _entering(self, name: str):
        def enter(module: nn.Module, arguments: tuple) -> None:
            opened = trace_range(name)
            opened.__enter__()
            self._open.append(opened)

        return enter

    def _leave(self, module: nn.Module, arguments: tuple, output: object) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)


def called_first(model: nn.Module) -> Iterator[nn.Module]:
    """The model; if it cannot be called itself, as an nn.ModuleDict of two networks, those in
    it."""
    if type(model).forward is not nn.Module.forward:
        yield model
        return
    for child in model.children():
        yield from called_first(child)
