"""Which flag that trains is seen in the steps, and how?  A table, and the program that fills it in.

Started by test_flags_in_effect.py, as the GPU is pretended from its second part on: python3
tests/flags_in_effect.py prints as JSON, for each row of the table, what was seen with its flags and
without them.
"""

import contextlib
import importlib
import io
import json
import os
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "pretend_gpu"))

from harness.run.startup import default_variables

os.environ |= default_variables()

import torch
from helpers import SMALL_MODEL
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

import tiny_llama_v1
from harness.base.ranges import range_observers
from tiny_llama_v1 import TinyLlamaWorkload

FOLDER = Path(__file__).resolve().parent
STEPS = 2
TEXT = "a file to train on, in the letters that it has; " * 8
FILE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower, self.relu, self.upper = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.upper(self.relu(self.lower(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def workload():
    model = Net()

    def batches():
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.randn(4, 8, generator=generator)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, batches(), lambda model, batch: model(batch).square().mean()
"""


class Seen:
    """What the steps of a run do, as it is seen from outside of them.  One of the
    range_observers."""

    def __init__(self, workload, state, graph_calls: list):
        self.workload, self.state, self.graph_calls = workload, state, graph_calls
        self.shapes: dict[str, list[int]] = {}  # of the output of each module, by its name
        self.dtypes: dict[str, str] = {}
        self.inputs: dict[str, list[list[int]]] = {}
        self.calls: Counter[str] = Counter()  # of modules, by their class
        self.operators: Counter[str] = Counter()
        self.in_forward: dict[str, object] = {}  # settings of the process
        self.reduced_in: set[str] = set()
        self.tokens: set[int] = set()
        self.steps = 0

    # ---- By the named ranges of a step -----------------------------------------------------------

    def range_push(self, name: str) -> None:
        if name == "forward" and not self.in_forward:
            self.first_weight = local(next(self.bare.parameters())).flatten()[0].item()
            self.device = next(self.bare.parameters()).device.type
            self.in_forward = {
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "matmuls": torch.get_float32_matmul_precision(),
            }
        if name == "backward":
            units = [
                m for m in self.bare.modules() if isinstance(m, FSDPModule) and m is not self.bare
            ]
            self.gathered_in_backward = any(
                not isinstance(p, DTensor) for m in units for p in m.parameters()
            )
        if name == "optimizer":
            self.steps += 1

    def range_pop(self) -> None:
        pass

    def before_the_update(self, optimizer: torch.optim.Optimizer, *_) -> None:
        parameters = [p for p in self.bare.parameters() if p.grad is not None]
        gradients = [local(p.grad) for p in parameters]
        self.norm_of_gradients = torch.stack([g.float().norm() for g in gradients]).norm().item()
        self.in_buckets = any(g.untyped_storage().nbytes() > g.nbytes for g in gradients)
        self.before = [local(p).detach().clone() for p in self.bare.parameters()]

    def after_the_update(self, *_) -> None:
        pairs = zip(self.bare.parameters(), self.before, strict=True)
        self.moved = max((local(p) - before).abs().max().item() for p, before in pairs)

    # ---- By hooks of modules ---------------------------------------------------------------------

    @property
    def bare(self) -> nn.Module:
        """The model within what wraps it."""
        model = self.state.model
        while not hasattr(model, "layers"):
            model = model.module if hasattr(model, "module") else model.loss.model
        return model

    def enters(self, name: str):
        def enter(module, arguments) -> None:
            self.calls[type(module).__name__.removeprefix("FSDP")] += 1
            tensors = [list(x.shape) for x in arguments if isinstance(x, Tensor)]
            self.inputs.setdefault(name, []).append(tensors)
            for weight in module.parameters(recurse=False):
                self.dtypes[f"{name}.weight"] = short(weight.dtype)

        return enter

    def leaves(self, name: str):
        def leave(module, arguments, output) -> None:
            if isinstance(output, Tensor):
                self.shapes[name], self.dtypes[name] = list(output.shape), short(output.dtype)

        return leave

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        if not self.workload.compiled:  # whose graphs would have the hooks in them
            for name, module in self.bare.named_modules():
                module.register_forward_pre_hook(self.enters(name), prepend=True)
                module.register_forward_hook(self.leaves(name))
        self.state.optimizer.register_step_pre_hook(self.before_the_update)
        self.state.optimizer.register_step_post_hook(self.after_the_update)
        all_reduce = torch.distributed.all_reduce

        def reduced(tensor, *arguments, **options):
            self.reduced_in.add(short(tensor.dtype))
            return all_reduce(tensor, *arguments, **options)

        range_observers.append(self)
        called = len(self.graph_calls)
        try:
            with (
                mock.patch.object(torch.distributed, "all_reduce", reduced),
                torch.autograd.profiler.profile(use_cpu=True) as profile,
            ):
                yield
        finally:
            range_observers.remove(self)
        self.graphs_run = len(self.graph_calls) - called
        self.operators.update(event.name() for event in profile.kineto_results.events())
        self.all_reduces = self.operators["c10d::allreduce_"]

    def batches(self, stream: Iterator) -> Iterator:
        for batch in stream:
            if isinstance(batch, tuple):
                self.tokens |= set(batch[0].cpu().flatten().tolist())
            yield batch


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- The table -----------------------------------------------------------------------------------

OTHER = "other than without the flags"


class Row(NamedTuple):
    """flags: of a run, in whose steps what see() sees is `found`; in those of a run without them it
    is `without`.

    instead_of: flags of that other run."""

    flags: str
    see: Callable[[Seen], object]
    found: object
    without: object
    instead_of: str = ""
    on_gpu: bool = False


def ran(name: str) -> Callable[[Seen], bool | int]:
    """Whether the operator of this name ran; of matmuls how often."""
    if name == "aten::mm":
        return lambda seen: seen.operators[name]
    return lambda seen: seen.operators[name] > 0


def width_of_mlp(seen: Seen) -> int:
    return seen.shapes["layers.0.mlp.up_proj"][2]


def is_clipped(seen: Seen) -> bool:
    return seen.norm_of_gradients < 0.0011


def is_deterministic(seen: Seen) -> bool:
    return seen.in_forward["deterministic"]


def mode(seen: Seen) -> str | None:
    if isinstance(seen.bare, FSDPModule):
        return "fsdp"
    if not isinstance(seen.state.model, nn.parallel.DistributedDataParallel):
        return None
    return "zero1" if isinstance(seen.state.optimizer, ZeroRedundancyOptimizer) else "ddp"


def sharded_units(seen: Seen) -> int:
    return sum(isinstance(module, FSDPModule) for module in seen.bare.modules())


def replays(seen: Seen) -> int:
    return replays_of(seen.state.model)


def replays_of(model: nn.Module) -> int:
    """Of the graph of its passes, if it has one."""
    return model.loss.replays if hasattr(model, "loss") else 0


# Runs with flags that do not hide one another's effect, so that there are fewer of them.
SHAPE = (
    "--vocab-size 96 --hidden-dim 64 --n-layers 3 --n-heads 8 --n-kv-heads 4 --intermediate-dim 48 "
    "--batch-size 2 --seq-len 8 --num-steps 3 --gradient-accumulation-steps 2"
)
NUMBERS = (
    "--learning-rate 0.01 --grad-clip 0.001 --seed 7 --deterministic --data text.txt"
    " --vocab-size 256"
)
FUSED = (
    "--attention sdpa --fused-projections --fused-norm --fused-rope --fused-loss --optimizer-impl"
    " fused --precision bf16"
)
COMPILED = "--compile --compile-mode max-autotune"
FULL = "--activation-checkpointing full"
RANKS = "--world-size 2 --dry-run"  # the settings of a rank of two; the run has a group of one
DDP, FSDP = f"{RANKS} --parallel ddp", f"{RANKS} --parallel fsdp"
BUCKETS = f"{DDP} --bucket-mb 0.001 --no-gradient-as-bucket-view --reduce-precision bf16"
GATHERED = f"{FSDP} --no-fsdp-reshard --param-precision bf16"
TABLE: dict[str, list[Row]] = {  # by the destination of the flag
    "vocab_size": [Row(SHAPE, lambda seen: seen.shapes["lm_head"][2], 96, 64)],
    "hidden_dim": [Row(SHAPE, lambda seen: seen.shapes["embedding"][2], 64, 32)],
    "n_layers": [Row(SHAPE, lambda seen: seen.calls["TransformerBlock"], 3 * 2 * 3, 2 * STEPS)],
    "n_heads": [Row(SHAPE, lambda seen: seen.inputs["rope"][0][0][1], 8, 4)],
    "n_kv_heads": [Row(SHAPE, lambda seen: seen.inputs["rope"][1][0][1], 4, 2)],
    "intermediate_dim": [Row(SHAPE, width_of_mlp, 48, 64)],
    "size": [Row("--size small", width_of_mlp, 1104, 64)],
    # The inputs are those of a micro-batch.
    "batch_size": [Row(SHAPE, lambda seen: seen.inputs["embedding"][0][0][0], 1, 4)],
    "seq_len": [Row(SHAPE, lambda seen: seen.inputs["embedding"][0][0][1], 8, 16)],
    "num_steps": [Row(SHAPE, lambda seen: seen.steps, 3, STEPS)],
    "gradient_accumulation_steps": [
        Row(SHAPE, lambda seen: len(seen.inputs["embedding"]), 2 * 3, STEPS),
    ],
    "learning_rate": [Row(NUMBERS, lambda seen: f"{seen.moved:.0e}", "1e-02", "1e-04")],
    "grad_clip": [Row(NUMBERS, is_clipped, True, False)],
    "seed": [Row(NUMBERS, lambda seen: seen.first_weight, OTHER, OTHER)],
    "deterministic": [Row(NUMBERS, is_deterministic, True, False)],
    "data": [Row(NUMBERS, lambda seen: seen.tokens <= {*TEXT.encode()}, True, False)],
    "attention": [Row(FUSED, ran("aten::scaled_dot_product_attention"), True, False)],
    "fused_projections": [Row(FUSED, lambda seen: seen.calls["FusedLinear"], 2 * 2 * STEPS, 0)],
    "fused_norm": [Row(FUSED, ran("aten::rms_norm"), True, False)],
    "fused_rope": [Row(FUSED, ran("aten::addcmul"), True, False)],
    "fused_loss": [Row(FUSED, lambda seen: "lm_head" in seen.shapes, False, True)],
    "optimizer_impl": [
        Row(FUSED, ran("aten::_fused_adamw_"), True, False),
        Row("--optimizer-impl foreach", ran("aten::_foreach_addcdiv_"), True, False),
    ],
    "precision": [
        Row(FUSED, lambda seen: seen.dtypes["layers.0.mlp.down_proj"], "bfloat16", "float32"),
        Row("--precision fp16", lambda seen: seen.dtypes["lm_head"], "float16", "float32"),
        Row("--precision fp16", lambda seen: seen.state.scaler.is_enabled(), True, False),
        Row("--precision bf16-true", lambda seen: seen.dtypes["lm_head.weight"], "bfloat16",
            "float32"),
        Row("--precision tf32", lambda seen: seen.in_forward["matmuls"], "high", "highest",
            on_gpu=True),
    ],
    "use_amp": [Row("--use-amp", lambda seen: seen.dtypes["lm_head"], "bfloat16", "float32")],
    "device": [Row("--device cpu", lambda seen: seen.device, "cpu", "cuda", on_gpu=True)],
    "kernels": [
        Row("--kernels triton", ran("kernels::rms_norm"), True, False, on_gpu=True),
        Row("--kernels triton", ran("kernels::swiglu"), True, False, on_gpu=True),
    ],
    "activation_checkpointing": [
        Row(FULL, lambda seen: seen.calls["TransformerBlock"], 4 * STEPS, 2 * STEPS),
        Row("--activation-checkpointing 2", lambda seen: seen.calls["TransformerBlock"], 3 * STEPS,
            2 * STEPS),
        Row("--activation-checkpointing op", lambda seen: seen.calls["TransformerBlock"], 4 * STEPS,
            2 * STEPS),
        Row("--activation-checkpointing op", ran("aten::mm"), OTHER, OTHER, instead_of=FULL),
    ],
    "compile": [Row(COMPILED, lambda seen: seen.graphs_run > 0, True, False)],
    "compile_mode": [
        Row(COMPILED, lambda seen: seen.compiler_options.get("max_autotune"), True, None),
    ],
    "cuda_graphs": [Row("--cuda-graphs", replays, STEPS, 0, on_gpu=True)],
    "parallel": [
        Row(DDP, mode, "ddp", None),
        Row(f"{RANKS} --parallel zero1", mode, "zero1", None),
        Row(FSDP, mode, "fsdp", None),
    ],
    "bucket_mb": [Row(BUCKETS, lambda seen: seen.all_reduces, OTHER, OTHER, instead_of=DDP)],
    "gradient_as_bucket_view": [
        Row(BUCKETS, lambda seen: seen.in_buckets, False, True, instead_of=DDP),
    ],
    "reduce_precision": [
        Row(BUCKETS, lambda seen: sorted(seen.reduced_in), ["bfloat16"], [], instead_of=DDP),
    ],
    "fsdp_reshard": [
        Row(GATHERED, lambda seen: seen.gathered_in_backward, True, False, instead_of=FSDP),
    ],
    "param_precision": [
        Row(GATHERED, lambda seen: seen.dtypes["lm_head"], "bfloat16", "float32", instead_of=FSDP),
    ],
    "fsdp_wrap": [
        Row(f"{FSDP} --fsdp-wrap model", sharded_units, 1, 3, instead_of=FSDP),
        Row(f"{FSDP} --fsdp-wrap sublayer", sharded_units, 9, 3, instead_of=FSDP),
    ],
}  # fmt: skip
OF_A_FILE = "--workload file.py"
IN_A_FILE = (
    f"{OF_A_FILE} --num-steps 3 --seed 7 --deterministic --grad-clip 0.001 --optimizer-impl fused"
    " --precision bf16 --activation-checkpointing"
)
COMPILED_FILE = f"{OF_A_FILE} --compile --compile-mode max-autotune"
WITH_A_FILE: dict[str, list[Row]] = {  # the same of a step in a file
    "num_steps": [Row(IN_A_FILE, lambda seen: seen.steps, 3, STEPS, OF_A_FILE)],
    "seed": [Row(IN_A_FILE, lambda seen: seen.first_weight, OTHER, OTHER, OF_A_FILE)],
    "deterministic": [Row(IN_A_FILE, is_deterministic, True, False, OF_A_FILE)],
    "grad_clip": [Row(IN_A_FILE, is_clipped, True, False, OF_A_FILE)],
    "optimizer_impl": [Row(IN_A_FILE, ran("aten::_fused_adamw_"), True, False, OF_A_FILE)],
    "activation_checkpointing": [
        Row(IN_A_FILE, lambda seen: seen.calls["ReLU"], 2 * 2 * 3, 2 * STEPS, OF_A_FILE),
    ],
    "precision": [
        Row(IN_A_FILE, lambda seen: seen.dtypes["layers.0.upper"], "bfloat16", "float32",
            OF_A_FILE),
        Row(f"{OF_A_FILE} --precision bf16-true",
            lambda seen: seen.dtypes["layers.0.upper.weight"], "bfloat16", "float32", OF_A_FILE),
    ],
    "compile": [Row(COMPILED_FILE, lambda seen: seen.graphs_run > 0, True, False, OF_A_FILE)],
    "compile_mode": [
        Row(COMPILED_FILE, lambda seen: seen.compiler_options.get("max_autotune"), True, None,
            OF_A_FILE),
    ],
    "parallel": [Row(f"{FSDP} {OF_A_FILE}", mode, "fsdp", None, OF_A_FILE)],
}  # fmt: skip

# ---- Filling it in -------------------------------------------------------------------------------

BASE = [*SMALL_MODEL, "--num-steps", str(STEPS)]
graph_calls: list[int] = []  # an entry for each run of a compiled graph
compiler_options: dict[str, object] = {}  # of the last compilation


def compiled(
    graph: torch.fx.GraphModule, inputs: list, config_patches: dict | None = None, **_
) -> Callable:
    """In the place of Inductor, whose code takes seconds to generate: the graph, run operator by
    operator."""
    compiler_options.update(config_patches or {})

    def run(*arguments):
        graph_calls.append(1)
        return graph.forward(*arguments)

    return run


def device_code() -> types.ModuleType:
    """In the place of the Triton kernels, which need a GPU or Triton's interpreter."""
    module = types.ModuleType("kernels.device_code")
    module.rms_norm = lambda x, weight, eps, y, scale: (y.copy_(x), scale.fill_(1.0))
    module.rms_norm_backward = lambda gradient, x, weight, scale, x_gradient, sums: (
        x_gradient.copy_(gradient),
        sums.zero_(),
    )
    module.swiglu = lambda gate, up, out: out.copy_(gate * up)
    module.swiglu_backward = lambda gradient, gate, up, gates, ups: (
        gates.copy_(gradient * up),
        ups.copy_(gradient * gate),
    )
    return module


def seen_in_run(flags: str) -> Seen:
    """Of a run of tiny_llama_v1.py with these flags, without what it prints."""
    runs: list[Seen] = []

    def watched(train: Callable) -> Callable:
        def train_watched(workload, state, stream, num_steps, meter, instruments) -> None:
            seen = Seen(workload, state, graph_calls)
            runs.append(seen)
            with seen.watching():
                train(workload, state, seen.batches(stream), num_steps, meter, instruments)
            seen.compiler_options = dict(compiler_options)

        return train_watched

    given = flags.split() if "--workload" in flags else [*BASE, *flags.split()]
    if "--num-steps" not in given:
        given += ["--num-steps", str(STEPS)]
    compiler_options.clear()
    workload, profiling = tiny_llama_v1.resolve(tiny_llama_v1.build_parser().parse_args(given))
    kind = type(workload)
    group = contextlib.nullcontext((0, 1))
    with (
        mock.patch.object(kind, "train", watched(kind.train)),
        mock.patch.object(tiny_llama_v1, "process_group", lambda device, settings: group),
        mock.patch("analysis.prediction.preflight.check_fits_in_memory", lambda *arguments: None),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        tiny_llama_v1.run(workload, profiling)
    return runs[0]


def filled_in(on_gpu: bool) -> Iterator[dict]:
    runs: dict[str, Seen] = {}  # by their flags
    for kind, table in (("", TABLE), (OF_A_FILE, WITH_A_FILE)):
        for name, rows in table.items():
            for row in rows:
                if row.on_gpu != on_gpu:
                    continue
                for flags in (row.flags, row.instead_of):
                    if flags not in runs:
                        runs[flags] = seen_in_run(flags)
                seen, without = row.see(runs[row.flags]), row.see(runs[row.instead_of])
                yield {
                    "flag": name,
                    "of": kind,
                    "flags": row.flags,
                    "seen": seen,
                    "without": without,
                }


def captured_in_studies() -> dict[str, list]:
    """For each study of --cuda-graphs: of each step whether graphs were asked for, and whether it
    replayed them."""
    from harness.model.cuda_graphs import GraphedModel
    from studies.engine.command_line import workload_of
    from studies.optimization_parts import turns
    from studies.timing import cold_steps, interleaved

    settings = {"size": "tiny", "n_layers": 1, "batch_size": 1, "seq_len": 8, "device": "cuda"}
    plain, graphed = workload_of(**settings), workload_of(["--cuda-graphs"], **settings)
    turns.matmul_rate = lambda device, precision: None
    studies = {
        "timing": lambda: (interleaved(plain, graphed, 2, 2, 1), cold_steps(graphed, 1)),
        "optimization": lambda: turns.take_turns([plain, graphed], 1, 1),
    }
    steps: list[tuple[bool, bool]] = []
    train = TinyLlamaWorkload.train

    def train_watched(workload, state, *arguments) -> None:
        before = replays_of(state.model)
        train(workload, state, *arguments)
        is_replayed = isinstance(state.model, GraphedModel) and replays_of(state.model) > before
        steps.append((workload.training.cuda_graphs, is_replayed))

    answers = {}
    with mock.patch.object(TinyLlamaWorkload, "train", train_watched):
        for name, study in studies.items():
            steps.clear()
            study()
            answers[name] = sorted(set(steps))
    return answers


def main() -> None:
    from torch._inductor import compile_fx

    import kernels

    torch.manual_seed(0)
    compile_fx.compile_fx = compiled
    sys.modules["kernels.device_code"] = kernels.device_code = device_code()
    importlib.import_module("harness.model.optimizations").compiler_problem = lambda on_gpu: None
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("text.txt").write_text(TEXT)
        Path("file.py").write_text(FILE)
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        answers += filled_in(False)
        torch.distributed.destroy_process_group()
        os.environ["PRETEND_GPU"] = "h100"
        import pretended

        pretended.install()
        answers += filled_in(True)
        in_studies = captured_in_studies()
        os.chdir("/")
    print(json.dumps({"rows": answers, "captured_in_studies": in_studies}))


if __name__ == "__main__":
    main()
