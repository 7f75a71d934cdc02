"""What torch.compile makes of a model, run operator by operator on fake tensors: each of its
tensors is seen."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily


class InterpretedGraphs:
    """A backend of torch.compile whose graphs run operator by operator under a watcher, which is a
    dispatch mode.

    They keep the same tensors for the backward pass as compiled code.  Intermediate results that
    fused kernels never write to memory are allocated here, so that the peak is an upper bound.

    Dynamo neither compiles nor calls compiled code under a dispatch mode other than FakeTensorMode.
    So compile, and run once forward and backward, before the watcher is entered.  In a watched()
    call the watcher is put aside, and comes back while a graph runs; autograd runs backward graphs
    outside of such calls, where the watcher is in place.
    """

    def __init__(self, watcher: TorchDispatchMode):
        torch.compiler.reset()
        self.watcher, self.is_aside = watcher, False

    def backend(self) -> Callable:
        from functorch.compile import min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor import lowering  # noqa: F401  for a decomposition of max pooling
        from torch._inductor.decomposition import select_decomp_table

        options = {
            "partition_fn": min_cut_rematerialization_partition,
            "decompositions": select_decomp_table(),
        }
        return aot_autograd(fw_compiler=self._runner, bw_compiler=self._runner, **options)

    def _runner(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        def run(arguments: list):
            """Runs the graph, and frees each tensor after its last use, as generated code does."""
            with pushed(self.watcher) if self.is_aside else contextlib.nullcontext():
                return WithoutRandomState(graph).boxed_run(arguments)

        run._boxed_call = True
        return run

    def watched(self, compiled: Callable) -> Callable:
        """The compiled callable, for calls under the watcher, the innermost of the modes."""

        def call(*arguments, **options):
            with _pop_mode_temporarily():
                self.is_aside = True
                try:
                    return compiled(*arguments, **options)
                finally:
                    self.is_aside = False

        return call


class WithoutRandomState(torch.fx.Interpreter):
    """Runs operators that are recomputed with the random numbers of the first time, such as
    attention, without any: a generator's state is no fake tensor,
    and on a GPU it is on the host."""

    def call_function(self, target, args: tuple, kwargs: dict):
        name = getattr(target, "__name__", "")
        if name == "run_and_save_rng_state":
            operator, *rest = args
            return torch.empty(0, dtype=torch.uint8), operator(*rest, **kwargs)
        if name == "run_with_rng_state":
            _, operator, *rest = args
            return operator(*rest, **kwargs)
        return super().call_function(target, args, kwargs)


@contextlib.contextmanager
def pushed(mode: TorchDispatchMode) -> Iterator[None]:
    """Pushes an active mode onto the stack again, without the __enter__ of its class."""
    TorchDispatchMode.__enter__(mode)
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)
