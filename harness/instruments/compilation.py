"""torch.compile of a model: in place, timed before and after,
and an error where it compiles nothing."""

import contextlib
import importlib
import inspect
import statistics
import types
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from harness.base.errors import UserError, innermost_cause
from harness.machine.clock import time_synced
from harness.model.module_ranges import called_first
from harness.model.workload import TrainingState, Workload

# So that each call of torch.compile has graphs of its own.  Without it, before PyTorch 2.13, a
# second model of the same class and shapes runs those of the first, and takes no time to compile;
# the ninth of a class is not compiled any more.
APART: dict[str, bool] = {}
if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
    APART["isolate_recompiles"] = True


def compile_in_place(model: nn.Module, **arguments: object) -> None:
    """torch.compile of all that a step calls first; the modules stay the same.  arguments: those of
    torch.compile."""
    from torch._dynamo import config, trace_rules  # takes seconds
    from torch._dynamo.external_utils import wrap_inline

    for module in called_first(model):
        # Dynamo skips the frames of PyTorch's own files.  Where the forward pass is defined in one
        # of them, also that of a subclass which inherits it, nothing would be compiled: what calls
        # it is compiled there instead, a frame that is not skipped.  torch.compile(module) decides
        # so too; module.compile() does not.
        skipped = isinstance(module.forward, types.MethodType) and bool(
            trace_rules.check(module.forward)
        )
        if hasattr(config, "wrap_top_frame"):
            with config.patch(wrap_top_frame=skipped):
                module.compile(dynamic=False, **APART, **arguments)
        elif skipped:  # of PyTorch 2.6
            called = wrap_inline(module._call_impl)
            module._compiled_call_impl = torch.compile(called, dynamic=False, **APART, **arguments)
        else:
            module.compile(dynamic=False, **APART, **arguments)


def compiler_options(mode: str) -> dict[str, object]:
    """Those of torch.compile for --compile-mode;
    torch.compile takes a mode or options, not both."""
    from torch._inductor import list_mode_options

    return list_mode_options(mode)


def graphs_compiled() -> int:
    """How many graphs torch.compile has made in this process since its counters were cleared."""
    from torch._dynamo import utils

    return utils.counters["stats"]["unique_graphs"]


@contextlib.contextmanager
def compiling(what: str, instead: str = "") -> Iterator[None]:
    """Around the first call of what is to be compiled; what: its name in a sentence, instead: what
    to do where it cannot be.

    Raises UserError if the compiler fails, or if it makes no graph: what follows would be timed as
    compiled code, and runs as before."""
    from torch._dynamo import exc, utils

    before = graphs_compiled()
    try:
        yield
    except exc.TorchDynamoException as error:
        raise UserError(f"{what} cannot be compiled here: {innermost_cause(error)}") from error
    # Where graphs are shared, those of an earlier model may have run.
    if graphs_compiled() == before and (APART or not before):
        breaks = list(utils.counters["graph_break"])
        reason = f" ({breaks[0].strip().splitlines()[0]})" if breaks else ""
        raise UserError(
            f"{what} was not compiled: torch.compile made no graph of it{reason}{instead}"
        )


class CompileTimes(NamedTuple):
    """A call before and after it was compiled."""

    uncompiled_ms: float  # medians
    compiled_ms: float
    compile_s: float  # of the first call, beyond the median of those after it
    from_cache: bool  # all of the generated code
    passes: int  # timed before and after


PASSES = 3  # timed calls before and after compiling, each time after an untimed one


def compile_and_time(
    call: Callable[[], object],
    compile_it: Callable[[], object],
    device: torch.device,
    what: str,
    instead: str = "",
) -> CompileTimes:
    """The times of call(), before and after compile_it() has it call compiled code.

    Libraries are set up and the compiler is imported before the clock starts: what remains is the
    compiler's alone.  what, instead: of compiling(), whose errors are raised."""
    from torch._dynamo import utils  # takes seconds

    importlib.import_module("torch._inductor.compile_fx")  # takes seconds, too

    def median_ms() -> float:
        return statistics.median(time_synced(call, device) for _ in range(PASSES))

    call()
    uncompiled_ms = median_ms()
    utils.counters.clear()
    compile_it()
    with compiling(what, instead):
        first_ms = time_synced(call, device)
    compiled_ms = median_ms()
    counted = utils.counters["inductor"]
    from_cache = bool(counted["fxgraph_cache_hit"]) and not counted["fxgraph_cache_miss"]
    compile_s = max(0.0, first_ms - compiled_ms) / 1e3
    return CompileTimes(uncompiled_ms, compiled_ms, compile_s, from_cache, PASSES)


class Compilation:
    """torch.compile of a model before its first step: the compile time, and the time of a pass
    before and after.

    Measured with forward and backward passes over one batch, whose gradients are discarded, and
    with random numbers of their own, so that training is not affected.
    """

    def __init__(
        self,
        workload: Workload,
        state: TrainingState,
        batch,
        device: torch.device,
        *,
        records_kernels: bool = False,
        trains: bool = True,
    ):
        """records_kernels: a trace always shows GPU kernels, but generated CPU kernels only if the
        generated code records them.  trains: whether a pass is forward and backward, or forward
        alone."""
        self.workload, self.state, self.batch, self.trains = workload, state, batch, trains
        options = compiler_options(workload.training.compile_mode)
        options["cpp.enable_kernel_profile"] = records_kernels and device.type == "cpu"
        # A forward pass updates BatchNorm's averages.
        buffers = [buffer.clone() for buffer in state.model.buffers()]
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            self.times = compile_and_time(
                self._pass,
                lambda: compile_in_place(state.model, options=options),
                device,
                "--compile: this model",
                "; leave it out",
            )
        for buffer, before in zip(state.model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        del self.batch

    @property
    def compile_s(self) -> float:
        return self.times.compile_s

    def _pass(self) -> None:
        """Over the micro-batch; its gradients are discarded."""
        with torch.set_grad_enabled(self.trains):
            with self.state.autocast:
                loss = self.workload.loss(self.state.model, self.batch)
            if self.trains:
                loss.backward()
        self.state.model.zero_grad(set_to_none=True)
