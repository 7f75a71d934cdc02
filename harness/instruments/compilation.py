"""torch.compile of a model: in place, timed before and after,
and an error where it compiles nothing."""

import contextlib
import importlib
import inspect
import statistics
import types
from collections.abc import Iterator

import torch
from torch import nn

from harness.base.errors import UserError, innermost_cause
from harness.instruments.phases import break_even_step
from harness.machine.clock import time_synced
from harness.model.module_ranges import called_first
from harness.model.workload import TrainingState, Workload

# So that each call of torch.compile has graphs of its own.  Without it, before PyTorch 2.13, a
# second model of the same class and shapes runs those of the first, and takes no time to compile;
# the ninth of a class is not compiled any more.
APART: dict[str, bool] = {}
if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
    APART["isolate_recompiles"] = True


def compile_in_place(model: nn.Module, **options: object) -> None:
    """torch.compile of all that a step calls first; the modules stay the same.
    options: of torch.compile."""
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
                module.compile(dynamic=False, **APART, **options)
        elif skipped:  # of PyTorch 2.6
            called = wrap_inline(module._call_impl)
            module._compiled_call_impl = torch.compile(called, dynamic=False, **APART, **options)
        else:
            module.compile(dynamic=False, **APART, **options)


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


class Compilation:
    """torch.compile of a model before its first step: the compile time, and the time of a pass
    before and after.

    Measured with forward and backward passes over one batch, whose gradients are discarded, and
    with random numbers of their own, so that training is not affected.
    """

    PASSES = 3  # timed passes before and after compiling, each time after an untimed one

    def __init__(
        self,
        workload: Workload,
        state: TrainingState,
        batch,
        device: torch.device,
        mode: str,
        traced: bool,
    ):
        self.workload, self.state, self.device = workload, state, device
        buffers = [
            buffer.clone() for buffer in state.model.buffers()
        ]  # a forward pass updates BatchNorm's averages
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            self._compile(batch, mode, traced)
        for buffer, before in zip(state.model.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def _compile(self, batch, mode: str, traced: bool) -> None:
        from torch._dynamo import utils  # takes seconds

        importlib.import_module(
            "torch._inductor.compile_fx"
        )  # takes seconds, and is no compile time
        self._pass_ms(batch)
        self.uncompiled_ms = self._median_pass_ms(batch)
        utils.counters.clear()
        # A trace always shows GPU kernels, but generated CPU kernels only if the generated code
        # records them.
        options = compiler_options(mode) | {
            "cpp.enable_kernel_profile": traced and self.device.type == "cpu"
        }
        compile_in_place(self.state.model, options=options)
        with compiling("--compile: this model", "; leave it out"):
            first_ms = self._pass_ms(batch)
        self.compiled_ms = self._median_pass_ms(batch)
        self.compile_s = max(0.0, first_ms - self.compiled_ms) / 1e3
        found = utils.counters["inductor"]
        self.from_cache = bool(found["fxgraph_cache_hit"]) and not found["fxgraph_cache_miss"]

    def _pass_ms(self, batch) -> float:
        """Wall time of one forward and backward pass over a micro-batch, in ms."""

        def forward_and_backward() -> None:
            with self.state.autocast:
                loss = self.workload.loss(self.state.model, batch)
            loss.backward()

        elapsed_ms = time_synced(forward_and_backward, self.device)
        self.state.model.zero_grad(set_to_none=True)
        return elapsed_ms

    def _median_pass_ms(self, batch) -> float:
        return statistics.median(self._pass_ms(batch) for _ in range(self.PASSES))

    def document(self, micro_steps: int) -> dict:
        """Median pass times, the time saved per step of `micro_steps` passes,
        and the break-even step."""
        saved_ms = micro_steps * (self.uncompiled_ms - self.compiled_ms)
        return {
            "compile_s": self.compile_s,
            "from_cache": self.from_cache,
            "uncompiled_pass_ms": self.uncompiled_ms,
            "compiled_pass_ms": self.compiled_ms,
            "passes": self.PASSES,
            "saved_ms_per_step": saved_ms,
            "break_even_step": break_even_step(self.compile_s, saved_ms),
        }
