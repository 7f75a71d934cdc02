"""What a program asks of the system profiler that it runs under: to begin and to end a capture.

The stubs of nsys and rocprofv3 set PRETEND_UNDER.  Calls go to the list of calls in PRETEND_LOG, as
those of the tools.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from pretended.cards import fault

RESUME, PAUSE = "roctxProfilerResume", "roctxProfilerPause"


def note(call: str) -> int:
    if log := os.environ.get("PRETEND_LOG"):
        with Path(log).open("a") as file:
            file.write(f"{call}\n")
    return 0


class Operators:
    """emit_nvtx, which a build for CPUs refuses."""

    def __init__(self, enabled: bool = True, record_shapes: bool = False):
        self.note = f"emit_nvtx{' with shapes' if record_shapes else ''}"

    def __enter__(self) -> None:
        note(f"{self.note} begins")

    def __exit__(self, *exception) -> None:
        note(f"{self.note} ends")


def install() -> None:
    """NVIDIA's calls are in every torch, and do nothing alone; AMD's come with a library that
    rocprofv3 loads, and does not with the fault no_roctx.  Marks of steps are noted, too."""
    under = os.environ.get("PRETEND_UNDER")
    torch.autograd.profiler.emit_nvtx = Operators
    torch.cuda.nvtx.range_push = lambda name: note(name) if name.startswith("ProfilerStep") else 0
    if under == "nsys":
        torch.cuda.profiler.start = lambda: note("cudaProfilerStart")
        torch.cuda.profiler.stop = lambda: note("cudaProfilerStop")
    elif under == "rocprofv3" and not fault("no_roctx"):
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)
        functions = {name: kind(lambda thread, name=name: note(name)) for name in (RESUME, PAUSE)}

        class Library(ctypes.CDLL):
            """The program itself, CDLL(None), has the functions of the library too."""

            def __getattr__(self, name: str):
                return (
                    functions[name]
                    if self._name is None and name in functions
                    else super().__getattr__(name)
                )

        ctypes.CDLL = Library
