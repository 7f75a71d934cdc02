"""Loaded by every Python process that has this folder on PYTHONPATH: puts the pretend GPU into
torch once that is imported.  Not before, because a command sets its environment before it imports
torch.  What is measured of a card is a figure of this CPU: briefly, only to have one."""

import importlib.abc
import os
import sys


def _install(torch) -> None:
    import pretended

    pretended.install()


def _measure_briefly(measuring) -> None:
    measuring.SECONDS, measuring.SQUARES["cuda"], measuring.COPIED_BYTES["cuda"] = (
        0.01,
        (128, 256),
        2**22,
    )


class _After(importlib.abc.MetaPathFinder):
    """Calls a function with a module once that is imported."""

    def __init__(self, name, function):
        self.name, self.function = name, function

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        specs = (
            other.find_spec(name, path, target)
            for other in sys.meta_path[sys.meta_path.index(self) + 1 :]
        )
        spec = next(filter(None, specs), None)  # of others that wait for it, too
        if spec:
            load = spec.loader.exec_module

            def exec_module(module) -> None:
                sys.meta_path.remove(self)
                load(module)
                self.function(module)

            spec.loader.exec_module = exec_module
        return spec


if os.environ.get("PRETEND_GPU"):
    sys.meta_path[:0] = [
        _After("torch", _install),
        _After("analysis.hardware.measuring", _measure_briefly),
    ]
