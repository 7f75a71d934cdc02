#!/usr/bin/env python3
"""Tiny LLaMA V1, the PyTorch baseline of a profiling workshop: model, data, loop and flags.

A LLaMA decoder (RMSNorm, rotary embedding, grouped-query attention, SwiGLU) and the loop that
trains it, with every part of a step named, timed and accounted for.  It is deliberately not
optimized: separate projections, attention scores written to memory, no fused kernels.  It is the
baseline that every optimization is compared with.

    python3 tiny_llama_v1.py                                       50 steps of the default model
    python3 tiny_llama_v1.py --size small --output-dir runs/small  a larger one, files in a folder
    python3 tiny_llama_v1.py --enable-pytorch-profiler             a trace in ./pytorch_profiles
    python3 tiny_llama_v1.py --size large --dry-run                predict memory and least time
    python3 tiny_llama_v1.py --validate-setup                      check versions, train three steps
    torchrun --nproc-per-node 2 tiny_llama_v1.py                   data parallel, a process per GPU
    torchrun --nproc-per-node 2 tiny_llama_v1.py --parallel fsdp   parameters and optimizer sharded
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        tiny_llama_v1.py                                           the same on two nodes
    srun -n 16 --gpus-per-task=1 python3 tiny_llama_v1.py          the same in a Slurm job

From the parts to the whole: configuration, model, data, training loop, one run, flags; execution
begins in main(), at the end.  The measurement code (clocks, profilers, files, reports) is in
harness/, the analysis of what was measured in analysis/.

Tensor shapes in comments: B batch, S sequence, D hidden, H heads, K key/value heads, E = D / H head
dimension, D_ff feed-forward width, V vocabulary.  MB is 2^20 bytes.
A multiply-add counts as two FLOPs.
"""

from __future__ import annotations

from harness.run.startup import begin_command

if __name__ == "__main__":
    begin_command()  # before the imports below, which take seconds

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.base.command_line import OneLineParser, config_from, flag
from harness.base.console import say
from harness.base.errors import UserError, ending_despite_signals
from harness.base.ranges import trace_range
from harness.base.text import BF16_TRUE
from harness.instruments.audit import findings_text
from harness.instruments.recorder import Instruments, check_profiling
from harness.instruments.schedule import InstrumentSchedule, ProfilerConfig
from harness.instruments.timing import StepMeter
from harness.machine import devices, setup_checks
from harness.machine.devices import PRECISIONS, check_precision, choose_device
from harness.model.checkpointing import checkpointing_choice, run_block
from harness.model.chunked_loss import chunked_loss
from harness.model.corpus import synthetic_corpus, text_corpus
from harness.model.decoder.formulas import DecoderFormulas
from harness.model.grad_clip import clip_gradients
from harness.model.precision import autocast_of, cast_floats
from harness.model.user_code.user_workload import user_workload
from harness.model.workload import FlaggedWorkload, StepFormulas, TrainingState, check_shards
from harness.ranks.distributed import facts_of_ranks, first_failure, process_group, suffix_of_rank
from harness.ranks.failures import exit_code_of, raise_if_interrupted
from harness.ranks.parallel import ParallelConfig, gradient_sync, parallel_settings
from harness.run.flag_combinations import (
    PredictionConfig,
    check_combinations,
    check_device_has,
    check_model,
)
from harness.run.run_report import RunReport
from harness.run.run_summary import facts_of_rank
from harness.run.training_flags import (
    default_log_interval,
    implied_by_switches,
    training_lines,
    training_parser,
)
from harness.schema import unknown
from harness.session.session import Preparation, Session
from kernels.selection import norm_kernel, swiglu_kernel

# ---- Configuration -------------------------------------------------------------------------------


@dataclass(frozen=True)
class TinyLlamaConfig:
    """Shape of the model, and what follows from it: parameters and FLOPs."""

    vocab_size: int = flag(1000, "vocabulary size", minimum=2)
    hidden_dim: int = flag(256, "hidden dimension")
    n_layers: int = flag(4, "transformer blocks", alias="--num-layers")
    n_heads: int = flag(8, "attention heads", alias="--num-heads")
    n_kv_heads: int = flag(4, "key/value heads", shown="half the heads; all of them if odd")
    intermediate_dim: int = flag(512, "feed-forward width", shown="2 x --hidden-dim")
    max_seq_len: int = 128  # tokens; set to --seq-len: positions beyond it would only cost memory
    norm_eps: float = 1e-6  # keeps a row of zeros finite
    # The slowest pair of dimensions rotates by nearly 1 / theta from token to token.
    rope_theta: float = 10000.0
    init_std: float = 0.02  # of linear layers and embeddings, as GPT-2 and LLaMA

    @property
    def head_dim(self) -> int:
        return self.hidden_dim // self.n_heads

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    def parameter_count(self) -> int:
        """Trainable parameters; embedding and lm_head are separate tensors."""
        attention = 2 * self.hidden_dim * (self.hidden_dim + self.kv_dim)  # q and o, k and v
        mlp = 3 * self.hidden_dim * self.intermediate_dim  # gate, up, down
        layer = attention + mlp + 2 * self.hidden_dim  # and two norms
        return 2 * self.vocab_size * self.hidden_dim + self.n_layers * layer + self.hidden_dim

    def forward_flops_by_component(
        self, batch_size: int, seq_len: int, options: OptimizationConfig | None = None
    ) -> dict[str, int]:
        """Matmul FLOPs of one forward pass over [batch_size, seq_len] tokens, summed over layers.

        Convention: two per multiply-add, the full S x S scores (the causal half is computed and
        masked, as eager attention below does; a fused kernel may skip it), no element-wise work.
        Options change the parts, not the sum.
        """
        options = options or OptimizationConfig()
        tokens = batch_size * seq_len
        per_layer = {
            "attention.q_proj": 2 * tokens * self.hidden_dim * self.hidden_dim,
            "attention.k_proj": 2 * tokens * self.hidden_dim * self.kv_dim,
            "attention.v_proj": 2 * tokens * self.hidden_dim * self.kv_dim,
            "attention.scores": 2 * tokens * seq_len * self.hidden_dim,  # H heads of E = D / H each
            "attention.weighted_sum": 2 * tokens * seq_len * self.hidden_dim,
            "attention.o_proj": 2 * tokens * self.hidden_dim * self.hidden_dim,
            "mlp.gate_proj": 2 * tokens * self.hidden_dim * self.intermediate_dim,
            "mlp.up_proj": 2 * tokens * self.hidden_dim * self.intermediate_dim,
            "mlp.down_proj": 2 * tokens * self.intermediate_dim * self.hidden_dim,
        }
        fused = {}  # matmuls that become one
        if options.attention == "sdpa":
            fused["attention.sdpa"] = ("attention.scores", "attention.weighted_sum")
        if options.fused_projections:
            parts = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
            fused["attention.qkv_proj"] = parts
            fused["mlp.gate_up_proj"] = ("mlp.gate_proj", "mlp.up_proj")
        for matmul, parts in fused.items():
            per_layer[matmul] = sum(per_layer.pop(part) for part in parts)
        flops = {component: self.n_layers * count for component, count in per_layer.items()}
        flops["lm_head"] = 2 * tokens * self.hidden_dim * self.vocab_size
        return flops


@dataclass(frozen=True)
class OptimizationConfig:
    """How the same step is computed, the same result but for rounding: docs/optimizations.md"""

    attention: str = flag(
        "eager", "eager writes the scores to memory; sdpa is fused", choices=["eager", "sdpa"]
    )
    fused_projections: bool = flag(
        False, "one matmul for q, k and v, and one for gate and up: reads their input once"
    )
    fused_norm: bool = flag(
        False, "PyTorch's RMSNorm: one kernel on a GPU, the same operators on a CPU"
    )
    fused_rope: bool = flag(
        False, "rotary embedding in three kernels instead of five: 7 tensors moved, not 9"
    )
    fused_loss: bool = flag(
        False, "loss from a part of the vocabulary at a time: the logits never exist whole"
    )
    kernels: str = flag(
        "eager",
        "norm and SwiGLU: PyTorch's, or our own in Triton (GPUs)",
        choices=["eager", "triton"],
    )
    activation_checkpointing: str | int | bool = flag(
        False,
        "full: keep only the input of each block, recompute the rest; op: keep fused attention and"
        " every second matmul too; N: only every N-th block",
        type=checkpointing_choice,
        nargs="?",
        const=True,
        metavar="full|op|N",
    )
    optimizer_impl: str | None = flag(
        None,
        "AdamW over lists of tensors or in one kernel",
        choices=["foreach", "fused"],
        shown="PyTorch's choice",
    )
    compile: bool = flag(False, "torch.compile the model before step 1")
    compile_mode: str = flag(
        "default",
        "of torch.compile: reduce-overhead replays CUDA graphs, max-autotune times several kernels"
        " for each matmul",
        choices=["default", "reduce-overhead", "max-autotune"],
    )
    cuda_graphs: bool = flag(
        False, "capture forward and backward pass as CUDA graphs: one launch each"
    )


@dataclass(frozen=True)
class TrainingConfig(OptimizationConfig, ParallelConfig):
    """How the model is trained, on how many ranks, and where the files of the run go."""

    batch_size: int = flag(8, "samples per optimizer step and rank")
    seq_len: int = flag(128, "tokens per sample")
    num_steps: int = flag(50, "optimizer steps")
    learning_rate: float = flag(1e-4, "AdamW learning rate")
    gradient_accumulation_steps: int = flag(
        1, "micro-batches that the samples of a step are split into"
    )
    grad_clip: float | None = flag(
        None, "scale gradients down where the norm of them all is larger", metavar="NORM"
    )
    precision: str = flag(
        "fp32",
        "precision of the arithmetic; bf16 and fp16 use autocast, bf16-true has parameters in bf16",
        choices=[*PRECISIONS, BF16_TRUE],
    )
    device: str = flag(
        "auto",
        "auto: a GPU if available; cuda also selects ROCm GPUs",
        choices=["auto", "cuda", "cpu"],
    )
    data: str = flag("synthetic", "text file to train on (byte-level tokens)", metavar="FILE")
    seed: int = flag(42, "random seed of weights and data", minimum=0)
    deterministic: bool = flag(
        False, "deterministic algorithms: two runs give the same losses to the last digit"
    )
    output_dir: str | None = flag(
        None, "folder of the run; without it or profiling nothing is written", metavar="DIR"
    )
    log_interval: int = flag(
        1, "print every Nth step", shown="as many as 50 lines allow, 20 if profiled"
    )
    force: bool = flag(False, "train even if the predicted memory exceeds that of the device")


# Other flags override a row of --size.  The feed-forward widths are chosen to match the parameter
# counts in docs/commands.md.
# fmt: off
SHAPE = (
    "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "intermediate_dim",
    "seq_len", "batch_size", "num_steps", "vocab_size",
)
ROWS = {
    # name       hidden layers heads kv  ff     seq  batch steps vocab: in the order of SHAPE
    "tiny":        (256,   4,  8,  4,   512,  128,  8,  50,  1000),
    "small":       (512,   8,  8,  4,  1104,  256,  8,  50,  1000),
    "medium":      (1024, 12, 16,  8,  3456,  512, 16, 100,  1000),
    "large":       (2048, 16, 16,  8, 11136, 1024,  8, 100,  1000),
    "very_large":  (4096, 24, 32, 16, 32128, 2048,  4, 100,  1000),
    # Hidden dimensions and depths of the GPT family, no grouped-query attention, for the training
    # benchmark.
    "gpt2-small":  (768,  12, 12, 12,  3072,  128,  4,  50, 10000),
    "gpt2-medium": (1024, 24, 16, 16,  4096,  128,  4,  50, 10000),
    "gpt2-large":  (1280, 36, 20, 20,  5120,  128,  4,  50, 10000),
    "gpt2-xl":     (1600, 48, 25, 25,  6400,  128,  4,  50, 10000),
    "gpt3-2.7b":   (2560, 32, 32, 32, 10240,  128,  4,  50, 10000),
}
# fmt: on
SIZES: dict[str, dict[str, int]] = {
    name: dict(zip(SHAPE, row, strict=True)) for name, row in ROWS.items()
}
SIZE_ALIASES = {"med": "medium", "xl": "very_large", "verylarge": "very_large"}


# ---- Model ---------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Root-mean-square normalization over the last dimension, in float32 at any precision."""

    def __init__(self, dim: int, eps: float, kernel: Callable | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps, self.kernel = eps, kernel

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel:  # one for all of the operators below, which keeps one number per row
            return self.kernel(x, self.weight, self.eps)
        x32 = x.float()  # a sum of D squares overflows in fp16 and loses digits in bf16
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding, rotate-half convention: dimensions i and i + E/2 together."""

    def __init__(self, head_dim: int, max_seq_len: int, theta: float, fused: bool = False):
        super().__init__()
        self.fused, sign = fused, torch.ones(head_dim)
        if fused:  # the minus of the rotation is in the table
            sign[: head_dim // 2] = -1
        exponents = torch.arange(0, head_dim, 2).float() / head_dim
        inverse_frequency = 1.0 / theta**exponents  # [E/2]
        angles = torch.outer(torch.arange(max_seq_len).float(), inverse_frequency)  # [S, E/2]
        # [S, E]: i and i + E/2 rotate by the same angle
        angles = torch.cat((angles, angles), dim=-1)
        # Buffers move with the model; they follow from the configuration: no checkpoint has them.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", sign * angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, S, E] -> [B, H, S, E], rotated by position."""
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]  # [S, E]
        # Autocast narrows what matmuls read; without it x keeps its type.
        if not torch.is_autocast_enabled(x.device.type):
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        if self.fused:  # halves swapped by one copy; multiplied and added by one kernel
            swapped = x.roll(x.shape[3] // 2, dims=-1)  # [B, H, S, E]
            return torch.addcmul(x * cos, swapped, sin)
        first, second = x.chunk(2, dim=-1)  # [B, H, S, E/2] each
        rotated = torch.cat((-second, first), dim=-1)  # [B, H, S, E]: pairs rotated by 90 degrees
        return x * cos + rotated * sin


def repeat_kv(x: Tensor, n_heads: int) -> Tensor:
    """[B, K, S, E] -> [B, H, S, E]: a copy of each key/value head for each of the H/K query heads
    that share it."""
    batch_size, n_kv_heads, seq_len, head_dim = x.shape
    x = x[:, :, None].expand(-1, -1, n_heads // n_kv_heads, -1, -1)  # [B, K, H/K, S, E], a view
    return x.reshape(batch_size, n_heads, seq_len, head_dim)  # copies, where H > K


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, part: str = "attention"
) -> Tensor:
    """softmax(q k^T / sqrt(E) + mask) v with all [B, H, S, S] scores in memory: q [B, H, S, E], k
    and v [B, K, S, E], the mask [S, S] -> [B, H, S, E].
    `part` is the prefix of its range names."""
    with trace_range(f"{part}.scores"):
        # Scaling q is cheaper than scaling the scores: E numbers per token and head instead of S.
        scores = q * q.shape[-1] ** -0.5  # [B, H, S, E]
        scores = scores @ repeat_kv(k, q.shape[1]).transpose(2, 3)  # [B, H, S, S]
        scores = scores if mask is None else scores + mask
    with trace_range(f"{part}.softmax"):
        # A sum over S terms, so in float32.  The result is saved for the backward pass: memory
        # quadratic in S.
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)  # [B, H, S, S]
    with trace_range(f"{part}.weighted_sum"):
        return weights @ repeat_kv(v, q.shape[1])  # [B, H, S, E]


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, part: str = "attention"
) -> Tensor:
    """The same with F.scaled_dot_product_attention: PyTorch picks a kernel, and the fused ones
    never write the scores.

    They read each key/value head for all query heads that share it.  Those of GPUs for float32,
    and of CPUs before PyTorch 2.9, require as many as q has, so there the heads are copied, as in
    eager attention.
    """
    with trace_range(f"{part}.sdpa"):
        kind = q.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
        if not devices.shares_heads(kind, dtype):
            k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        grouped = k.shape[1] < q.shape[1]
        return F.scaled_dot_product_attention(q, k, v, None, 0.0, causal, enable_gqa=grouped)


class FusedLinear(nn.Linear):
    """Several linear layers of the same input as one matmul, which reads the input once: [..., D]
    -> [..., sum]."""

    def __init__(self, in_features: int, *widths: int):
        super().__init__(in_features, sum(widths), bias=False)
        self.widths = widths


class Attention(nn.Module):
    """Causal grouped-query attention, eager or fused."""

    def __init__(
        self,
        config: TinyLlamaConfig,
        options: OptimizationConfig,
        rope: RotaryEmbedding,
        layer: int,
    ):
        super().__init__()
        self.n_heads, self.n_kv_heads = config.n_heads, config.n_kv_heads
        self.head_dim, self.fused_projections = config.head_dim, options.fused_projections
        width, kv_width = config.hidden_dim, config.kv_dim
        if self.fused_projections:
            self.qkv_proj = FusedLinear(width, width, kv_width, kv_width)
        else:  # each of the three reads x
            self.q_proj = nn.Linear(width, width, bias=False)
            self.k_proj = nn.Linear(width, kv_width, bias=False)
            self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.rope = rope  # shared by all layers: its tables depend only on the positions
        self.range = f"layers.{layer}.attention"

    def forward(self, x: Tensor, causal_mask: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]; fused if there is no mask to add."""
        batch_size, seq_len, hidden_dim = x.shape
        by_head = (batch_size, seq_len, -1, self.head_dim)
        if self.fused_projections:
            with trace_range(f"{self.range}.qkv_proj"):
                heads = self.qkv_proj(x).view(by_head).transpose(1, 2)  # [B, H + 2 K, S, E]
                # Views, shapes as below
                q, k, v = heads.split((self.n_heads, self.n_kv_heads, self.n_kv_heads), dim=1)
        else:
            with trace_range(f"{self.range}.q_proj"):
                q = self.q_proj(x).view(by_head).transpose(1, 2)  # [B, H, S, E]
            with trace_range(f"{self.range}.k_proj"):
                k = self.k_proj(x).view(by_head).transpose(1, 2)  # [B, K, S, E]
            with trace_range(f"{self.range}.v_proj"):
                v = self.v_proj(x).view(by_head).transpose(1, 2)  # [B, K, S, E]
        with trace_range(f"{self.range}.rope"):
            q, k = self.rope(q), self.rope(k)
        if causal_mask is None:  # --attention sdpa: TinyLlamaModel makes no mask
            output = fused_attention(q, k, v, causal=True, part=self.range)  # [B, H, S, E]
        else:
            mask = causal_mask[:seq_len, :seq_len]
            output = eager_attention(q, k, v, mask, self.range)  # [B, H, S, E]
        with trace_range(f"{self.range}.o_proj"):
            # [B, S, D], a copy
            output = output.transpose(1, 2).reshape(batch_size, seq_len, hidden_dim)
            return self.o_proj(output)  # [B, S, D]


class MLP(nn.Module):
    """SwiGLU feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: TinyLlamaConfig, options: OptimizationConfig, layer: int):
        super().__init__()
        self.fused_projections, self.swiglu = options.fused_projections, swiglu_kernel(options)
        width, inner_width = config.hidden_dim, config.intermediate_dim
        if self.fused_projections:
            self.gate_up_proj = FusedLinear(width, inner_width, inner_width)
        else:
            self.gate_proj = nn.Linear(width, inner_width, bias=False)
            self.up_proj = nn.Linear(width, inner_width, bias=False)
        self.down_proj = nn.Linear(inner_width, width, bias=False)
        self.range = f"layers.{layer}.mlp"

    def forward(self, x: Tensor) -> Tensor:
        if self.fused_projections:
            with trace_range(f"{self.range}.gate_up_proj"):
                gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # [B, S, D_ff] each, views
        else:
            with trace_range(f"{self.range}.gate_proj"):
                gate = self.gate_proj(x)  # [B, S, D_ff]
            with trace_range(f"{self.range}.up_proj"):
                up = self.up_proj(x)  # [B, S, D_ff]
        with trace_range(f"{self.range}.activation"):
            # [B, S, D_ff]: two memory-bound kernels whose results are both saved, or one of our own
            activated = F.silu(gate) * up if self.swiglu is None else self.swiglu(gate, up)
        with trace_range(f"{self.range}.down_proj"):
            return self.down_proj(activated)  # [B, S, D]


class TransformerBlock(nn.Module):
    """Pre-norm residual block: attention, then feed-forward."""

    def __init__(
        self,
        config: TinyLlamaConfig,
        options: OptimizationConfig,
        rope: RotaryEmbedding,
        layer: int,
    ):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_dim, config.norm_eps, norm_kernel(options))
        self.attention = Attention(config, options, rope, layer)
        self.mlp_norm = RMSNorm(config.hidden_dim, config.norm_eps, norm_kernel(options))
        self.mlp = MLP(config, options, layer)
        self.range = f"layers.{layer}"

    def forward(self, x: Tensor, causal_mask: Tensor | None) -> Tensor:
        with trace_range(f"{self.range}.attention_norm"):
            normed = self.attention_norm(x)
        attended = self.attention(normed, causal_mask)
        with trace_range(f"{self.range}.attention_residual"):
            x = x + attended  # [B, S, D]; not in place: autograd needs the old x for the norm
        with trace_range(f"{self.range}.mlp_norm"):
            normed = self.mlp_norm(x)
        fed_forward = self.mlp(normed)
        with trace_range(f"{self.range}.mlp_residual"):
            return x + fed_forward


class TinyLlamaModel(nn.Module):
    """The decoder: input_ids [B, S] -> logits [B, S, V]; with labels [B, S] also the mean
    next-token loss.

    labels[b, s] is the token that follows input_ids[b, s]; nothing is shifted here.  With
    fused_loss and labels, the logits are None.
    """

    def __init__(self, config: TinyLlamaConfig, options: OptimizationConfig | None = None):
        super().__init__()
        options = options or OptimizationConfig()
        self.config, self.options = config, options
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.rope = RotaryEmbedding(
            config.head_dim, config.max_seq_len, config.rope_theta, options.fused_rope
        )
        blocks = (
            TransformerBlock(config, options, self.rope, layer) for layer in range(config.n_layers)
        )
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(config.hidden_dim, config.norm_eps, norm_kernel(options))
        # A matrix of its own, as in LLaMA: GPT-2 would use the embedding's.
        self.lm_head = nn.Linear(config.hidden_dim, config.vocab_size, bias=False)
        mask = None  # fused attention has a flag for causal masking, and skips the masked part
        if options.attention == "eager":
            # [S, S]: -inf above the diagonal, so that no token attends to a later one
            mask = torch.full((config.max_seq_len, config.max_seq_len), float("-inf")).triu(1)
        self.register_buffer("causal_mask", mask, persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                weight = module.weight.detach()  # a view
                # Fused weights part by part: the same seed gives the same numbers as separate ones.
                for part in weight.split(getattr(module, "widths", len(weight))):
                    nn.init.normal_(part, std=config.init_std)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None):
        if input_ids.shape[1] > self.config.max_seq_len:
            most = self.config.max_seq_len
            raise ValueError(f"{input_ids.shape[1]} tokens, but max_seq_len is {most}")
        with trace_range("embedding"):
            x = self.embedding(input_ids)  # [B, S, D]
        for index, layer in enumerate(self.layers):
            x = run_block(layer, index, self.options.activation_checkpointing, x, self.causal_mask)
        with trace_range("norm"):
            x = self.norm(x)
        if labels is not None and self.options.fused_loss:
            return None, chunked_loss(x, self.lm_head.weight, labels)
        with trace_range("lm_head"):
            logits = self.lm_head(x)  # [B, S, V]
        if labels is None:
            return logits
        with trace_range("loss"):
            # [B S, V] and [B S]; the log-softmax is another tensor of the logits' size, in float32.
            loss = F.cross_entropy(
                logits.float().view(-1, self.config.vocab_size), labels.reshape(-1)
            )
        return logits, loss


# ---- Data ----------------------------------------------------------------------------------------


def corpus_of(config: TinyLlamaConfig, training: TrainingConfig) -> np.ndarray:
    """The tokens to train on: integers of [0, vocab_size)."""
    if training.data == "synthetic":
        length = max(2**18, 64 * (training.seq_len + 1))
        return synthetic_corpus(config.vocab_size, length, training.seed)
    return text_corpus(training.data, config.vocab_size, training.seq_len)


def batches(corpus: np.ndarray, training: TrainingConfig, device: torch.device, rank: int = 0):
    """Endless (input_ids, labels), each [micro-batch, S] int64 on the device; labels are the next
    tokens.

    Samples start at random positions.  Every rank draws those of all and takes its own, so a step
    of W ranks with B samples has the data of one rank with W B.  On a GPU the copy is asynchronous,
    from pinned memory.
    """
    rng = np.random.default_rng([training.seed, 0])
    window = np.arange(training.seq_len + 1)
    micro_batch_size = training.batch_size // training.gradient_accumulation_steps
    while True:
        shape = training.world_size, micro_batch_size
        starts = rng.integers(0, len(corpus) - training.seq_len, size=shape)[rank]
        tokens = torch.from_numpy(corpus[starts[:, None] + window].astype(np.int64))  # [B, S + 1]
        if device.type == "cuda":  # from pageable memory the copy would block the host
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# ---- Training loop -------------------------------------------------------------------------------


def build(
    config: TinyLlamaConfig, training: TrainingConfig, device: torch.device, place=None
) -> TrainingState:
    """Model, optimizer, gradient scaler and autocast of a run, on the device, not compiled."""
    model = TinyLlamaModel(config, training)
    if training.precision == BF16_TRUE:
        cast_floats(model, torch.bfloat16)
    if place:  # in shards: the device may have no room for the whole model
        model = place(model)
    elif device.type != "cpu":  # fake tensors cannot be moved
        model = model.to(device)
    implementation = {}  # PyTorch chooses
    if training.optimizer_impl:
        implementation[training.optimizer_impl] = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate, **implementation)
    # The range of fp16 is 6e-8 to 65,504: the loss is scaled up so that small gradients do not
    # underflow.  bf16 has the range of fp32 and needs no scaling.
    scaler = torch.amp.GradScaler(device.type, enabled=training.precision == "fp16")
    autocast = autocast_of(training.precision, device, cache_enabled=not training.cuda_graphs)
    return TrainingState(model, optimizer, scaler, autocast)


def train(
    state: TrainingState,
    stream: Iterator,
    num_steps: int,
    micro_steps: int,
    grad_clip: float | None,
    meter: StepMeter,
    instruments: Instruments,
) -> None:
    """The training loop.  meter.phase() times the phases; optional profilers are attached by
    context managers.

    stream yields (input_ids, labels) of a micro-batch, [B / micro_steps, S] each.
    """
    model, optimizer, scaler, autocast = state
    for step in range(1, num_steps + 1):
        raise_if_interrupted()
        # ---- The timed section begins: nothing in it waits for the device. ----
        with meter.step(step), instruments.step(step):
            for micro_step in range(1, micro_steps + 1):
                with meter.phase("data"):
                    input_ids, labels = next(stream)
                with gradient_sync(model, last_micro_step=micro_step == micro_steps):
                    with meter.phase("forward"), instruments.forward(step), autocast:
                        # No reference to the logits is kept: they can be freed.
                        loss = model(input_ids, labels)[1]
                    with meter.phase("backward"):
                        # Gradients accumulate over micro-batches: divided, their sum is the mean
                        # over the batch.
                        scaler.scale(loss / micro_steps).backward()
                meter.add_loss(loss)  # an asynchronous copy: loss.item() would wait for the device
            with meter.phase("optimizer"):
                if grad_clip is not None:
                    scaler.unscale_(optimizer)  # the norm is that of the gradients as they are
                    meter.add_grad_norm(clip_gradients(optimizer, grad_clip))
                scaler.step(optimizer)  # optimizer.step(), unless fp16 gradients are infinite
                scaler.update()
                # Frees the gradients before the next forward pass.
                optimizer.zero_grad(set_to_none=True)
        # ---- The timed section ends: the meter reads events of steps that are finished. ----


@dataclass(frozen=True)
class TinyLlamaWorkload(FlaggedWorkload):
    """This model and its training, as the harness and the analysis see them."""

    config: TinyLlamaConfig
    training: TrainingConfig
    size: str | None = field(default=None, compare=False)  # the name given with --size

    title = "Tiny LLaMA V1 - PyTorch Baseline"
    can_be_captured = True

    def build(self, device: torch.device, place: Callable | None = None) -> TrainingState:
        return build(self.config, self.training, device, place)

    def batches(self, device: torch.device, rank: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(corpus_of(self.config, self.training), self.training, device, rank)

    def fake_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """As in a run: inputs and labels are shifted copies of one tensor of tokens."""
        shape = self.batch_size // self.micro_steps, self.seq_len + 1
        while True:
            tokens = torch.zeros(shape, dtype=torch.int64)
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(*batch)[1]

    def train(
        self, state: TrainingState, stream: Iterator, num_steps: int, meter, instruments
    ) -> None:
        grad_clip = self.training.grad_clip
        train(state, stream, num_steps, self.micro_steps, grad_clip, meter, instruments)

    def with_settings(self, **changes) -> TinyLlamaWorkload:
        training = replace(self.training, **changes)
        config = replace(self.config, max_seq_len=training.seq_len)
        return replace(self, training=training, config=config)

    def parameter_count(self) -> int:
        return self.config.parameter_count()

    @property
    def formulas(self) -> StepFormulas:
        return DecoderFormulas(self.config, self.training)

    def settings(self) -> dict[str, dict]:
        size = {"size": self.size} if self.size else unknown("no --size was given", "size")
        model = {**size, **asdict(self.config), "parameters": self.parameter_count()}
        return {"model": model, "training": asdict(self.training)}

    @classmethod
    def from_settings(cls, settings: dict[str, dict]) -> TinyLlamaWorkload:
        """The workload of a run, from its config.json."""
        config = config_from(TinyLlamaConfig, settings["model"])
        training = config_from(TrainingConfig, settings["training"])
        return cls(config, training, settings["model"]["size"])

    def settings_lines(self, device: torch.device) -> dict[str, object]:
        model, training = self.config, self.training
        return {
            "Batch Size": training.batch_size,
            "Sequence Length": training.seq_len,
            "Number of Steps": training.num_steps,
            "Hidden Dim": model.hidden_dim,
            "Num Layers": model.n_layers,
            "Num Heads": model.n_heads,
            "Intermediate Dim": model.intermediate_dim,
            "Num KV Heads": model.n_kv_heads,
            "Vocab Size": model.vocab_size,
            "Learning Rate": training.learning_rate,
            **training_lines(training, device),
        }


# ---- One run -------------------------------------------------------------------------------------


def run(
    workload: FlaggedWorkload,
    profiling: ProfilerConfig,
    examine: Callable | None = None,
    verbose: bool = False,
) -> dict | None:
    """One run: check, announce, train, report; returns the summary on rank 0.  Errors become one
    line in main().

    examine(device, rank, world_size) is called once the ranks have met.  verbose: print tables too.
    """
    training = workload.training
    device = choose_device(training.device)
    check_can_be_trained(workload, profiling, device)
    schedule = InstrumentSchedule(training.num_steps, profiling)  # which steps are profiled
    config = {**workload.settings(), "profiling": asdict(profiling)}
    from analysis.commands.run_ending import close_report  # late: slow to import
    from analysis.prediction.preflight import check_fits_in_memory

    with workload.step_settings(), process_group(device, config) as (rank, world_size):
        if examine:
            examine(device, rank, world_size)
        shown = {"log_interval": training.log_interval, "verbose": verbose}
        ranks, folder = (rank, world_size), training.output_dir
        report = RunReport(workload, profiling, schedule, device, ranks, output_dir=folder, **shown)
        report.open()
        try:
            report.announce()
            check_fits_in_memory(workload, device, training.force)
            train_and_measure(workload, profiling, device, report)
        except BaseException as error:  # Ctrl-C too: the completed steps are summarized and written
            with ending_despite_signals():
                from analysis.commands.run_explanations import with_prediction

                told = first_failure(with_prediction(error, workload, device))
                close_report(report, told)
            if told is error:
                raise
            raise told from error
        return close_report(report, None)


def train_and_measure(
    workload: FlaggedWorkload, profiling: ProfilerConfig, device: torch.device, report: RunReport
) -> None:
    """Make the step ready, and train with the instruments; what they measure is stored in the
    report."""
    measurements, num_steps = report.measurements, workload.training.num_steps
    meter = measurements.meter
    schedule, traces = report.schedule, report.folder.traces
    folder = report.folder.path if report.rank == 0 else None
    suffix = suffix_of_rank(report.rank, report.world_size)
    preparation = Preparation(tell=say, records_generated_code=profiling.records_trace)
    with Session(workload, device, (report.rank, report.world_size), preparation) as session:
        measurements.begin(session)
        instruments = Instruments(
            schedule, profiling, session.unwrapped, session.audit, device, folder, traces, suffix
        )
        measurements.instruments = instruments
        with measurements.sampler, instruments.run():
            workload.train(session.state, session.stream, num_steps, meter, instruments)
        meter.read_finished(wait=True)
        measurements.numbers.look_at_the_end(num_steps)
        measurements.no_sync = session.no_sync(profiling.no_sync_steps)
    # Waits for all: rank 0 reads the traces of all ranks.
    measurements.hear_of_ranks(facts_of_ranks(facts_of_rank(measurements)))


def check_can_be_trained(
    workload: FlaggedWorkload, profiling: ProfilerConfig, device: torch.device
) -> None:
    """Raise UserError before anything is written."""
    training = workload.training
    check_precision(training.precision, device)
    check_device_has(training, device)
    check_profiling(profiling, device, training.output_dir)
    if training.data != "synthetic":
        corpus_of(workload.config, training)  # the file may be unusable
    check_shards(workload)


def validate_setup(workload: TinyLlamaWorkload, profiling: ProfilerConfig, verbose: bool) -> None:
    """The checks of this machine and its set-up, then three steps."""
    setup_checks.examine(workload.training.device)
    short = workload.with_settings(num_steps=3)
    summary = run(short, profiling, setup_checks.examine_ranks, verbose)
    if summary and summary["audit"]["findings"]:
        findings = findings_text(summary["audit"])
        raise UserError(f"three steps ran, but they do not train: {findings}")
    say("Setup is valid: three steps were trained.")


# ---- Command line --------------------------------------------------------------------------------


def build_parser(prog: str = "tiny_llama_v1.py", description: str | None = None) -> OneLineParser:
    """All flags, from the dataclasses; each is None if the user did not pass it."""
    groups = {
        "model": TinyLlamaConfig,
        "training": TrainingConfig,
        "optimizations": OptimizationConfig,
        "several ranks": ParallelConfig,
        "prediction": PredictionConfig,
        "profiling": ProfilerConfig,
    }
    description = description or "Train Tiny LLaMA and show where time and memory went."
    return training_parser(prog, description, SIZES, SIZE_ALIASES, groups)


def resolve(args: argparse.Namespace) -> tuple[FlaggedWorkload, ProfilerConfig]:
    """Flags to configurations: what the user passed, else the row of --size, else the defaults.
    Raises UserError, exit code 2, for values that contradict each other."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    size = SIZE_ALIASES.get(args.size, args.size)
    shape = SIZES[size] if size else shape_that_follows(given)
    values = {**implied_by_switches(args), **shape, **given, **parallel_settings(given)}
    config = config_from(TinyLlamaConfig, values)
    training = config_from(TrainingConfig, values)
    profiling = config_from(ProfilerConfig, values)
    if args.log_interval is None and not args.verbose:
        interval = default_log_interval(training.num_steps, profiling)
        training = replace(training, log_interval=interval)
    check_model(config)
    check_combinations(training, profiling, given)
    if args.workload:
        from analysis.work.flop_counts import counted_flops  # late: slow to import

        return user_workload(args.workload, training, given, counted_flops), profiling
    config = replace(config, max_seq_len=training.seq_len)
    return TinyLlamaWorkload(config, training, size), profiling


def shape_that_follows(given: dict) -> dict[str, int]:
    """From flags, where no --size gives the shape."""
    shape = {}
    if "n_heads" in given:  # alone a valid change: the default of 4 need not divide it
        half, odd = divmod(given["n_heads"], 2)
        shape["n_kv_heads"] = given["n_heads"] if odd else half
    if "hidden_dim" in given:
        shape["intermediate_dim"] = 2 * given["hidden_dim"]
    return shape


def run_from_arguments(args: argparse.Namespace) -> None:
    """What the flags ask for: a prediction, a setup check, or a run."""
    workload, profiling = resolve(args)
    if args.dry_run:
        # Imported late: it can take longer than a short run.
        from analysis.prediction.dry_run import dry_run

        dry_run(workload, profiling, args)
    elif args.validate_setup:
        validate_setup(workload, profiling, args.verbose)
    else:
        run(workload, profiling, verbose=args.verbose)


def run_and_advise(argv: list[str] | None) -> None:
    from analysis.commands.run_ending import last_lines

    args = build_parser().parse_args(argv)
    run_from_arguments(args)
    if not args.dry_run:
        say(*last_lines(args))


def main(argv: list[str] | None = None) -> int:
    return exit_code_of(lambda: run_and_advise(argv))


if __name__ == "__main__":
    sys.exit(main())
