"""What a program asks of the system profiler that it runs under: to begin and to end a capture.

The stubs of nsys and rocprofv3 set PRETEND_UNDER.  Calls go to the list of calls in PRETEND_LOG, as those of the tools.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

RESUME, PAUSE = "roctxProfilerResume", "roctxProfilerPause"


def note(call: str) -> int:
    if log := os.environ.get("PRETEND_LOG"):
        with Path(log).open("a") as file:
            file.write(f"{call}\n")
    return 0


def install() -> None:
    """NVIDIA's calls are in every torch, and do nothing alone; AMD's come with a library that rocprofv3 loads."""
    under = os.environ.get("PRETEND_UNDER")
    if under == "nsys":
        torch.cuda.profiler.start = lambda: note("cudaProfilerStart")
        torch.cuda.profiler.stop = lambda: note("cudaProfilerStop")
    elif under == "rocprofv3":
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)
        functions = {name: kind(lambda thread, name=name: note(name)) for name in (RESUME, PAUSE)}

        class Library(ctypes.CDLL):
            """The program itself, CDLL(None), has the functions of the library too."""

            def __getattr__(self, name: str):
                return functions[name] if self._name is None and name in functions else super().__getattr__(name)

        ctypes.CDLL = Library
