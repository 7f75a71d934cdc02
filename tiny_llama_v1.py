#!/usr/bin/env python3
"""Tiny LLaMA V1: the PyTorch baseline of a profiling workshop, in one file that stands alone.

A LLaMA decoder (RMSNorm, rotary embedding, grouped-query attention, SwiGLU) and the loop that trains it, with
every part of a step named, timed and accounted for.  It is deliberately unoptimised: separate projections,
materialised attention scores, one kernel after another.  Later versions are measured against it.

    python3 tiny_llama_v1.py                                         50 steps of the default model
    python3 tiny_llama_v1.py --size small --output-dir runs/small    a larger one, files kept
    python3 tiny_llama_v1.py --enable-pytorch-profiler               a trace for TensorBoard in ./pytorch_profiles
    torchrun --nproc-per-node 2 tiny_llama_v1.py                     data parallel, one process per GPU
    python3 tiny_llama_v1.py --validate-setup                        what is installed, and does it train

Tensor shapes in comments: B batch, S sequence, D hidden, H heads, K key/value heads, E = D / H head width,
F feed-forward width, V vocabulary.  MB is 2^20 bytes.  A multiply-add counts as two FLOPs.
"""

from __future__ import annotations

import os
import signal
import sys

if os.path.dirname(os.path.realpath(sys.argv[0])) == os.path.dirname(os.path.realpath(__file__)):
    # One of our commands is starting: until it runs, imports take seconds, Ctrl-C ends it without a traceback.
    for _signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(_signum, lambda signum, frame: os._exit(128 + signum))

import argparse
import collections
import contextlib
import ctypes
import difflib
import functools
import gzip
import importlib.metadata
import importlib.util
import io
import itertools
import json
import math
import platform
import resource
import shlex
import shutil
import socket
import subprocess
import threading
import time
import traceback
import typing
import warnings
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or the profiler warns of tensors older than its window
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it prints a line when it starts and one when it stops

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SCHEMA_VERSION = 1
MB = 2**20
RULE = "=" * 42

# ---- Configuration -------------------------------------------------------------------------------------------------

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def flag(default, text: str, **options):
    """A configuration field that is also a command-line flag; `options` go to argparse."""
    return field(default=default, metadata={"help": text, **options})


@dataclass(frozen=True)
class TinyLlamaConfig:
    """Shape of the model.  What follows from it alone (parameters, FLOPs) is a method here."""

    vocab_size: int = flag(1000, "vocabulary", minimum=2)
    hidden_dim: int = flag(256, "model dimension")
    n_layers: int = flag(4, "transformer blocks", alias="--num-layers")
    n_heads: int = flag(8, "attention heads", alias="--num-heads")
    n_kv_heads: int = flag(4, "key/value heads", shown="half the heads; all of them if odd")
    intermediate_dim: int = flag(512, "feed-forward width", shown="2 x --hidden-dim")
    max_seq_len: int = 128
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    init_std: float = 0.02

    @property
    def head_dim(self) -> int:
        return self.hidden_dim // self.n_heads

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    def parameter_count(self) -> int:
        """Trainable parameters; embedding and lm_head are separate tensors."""
        attention = 2 * self.hidden_dim * (self.hidden_dim + self.kv_dim)
        mlp = 3 * self.hidden_dim * self.intermediate_dim
        layer = attention + mlp + 2 * self.hidden_dim
        return 2 * self.vocab_size * self.hidden_dim + self.n_layers * layer + self.hidden_dim

    def forward_flops_by_component(self, batch_size: int, seq_len: int, attention: str = "eager") -> dict[str, int]:
        """Matrix-multiply FLOPs of one forward pass over [batch_size, seq_len] tokens, summed over layers.

        Convention: two per multiply-add, the full S x S scores (the causal half is computed and masked, as eager
        attention below does; a fused kernel may skip it), no element-wise work.
        """
        tokens = batch_size * seq_len
        per_layer = {
            "attention.q_proj": 2 * tokens * self.hidden_dim * self.hidden_dim,
            "attention.k_proj": 2 * tokens * self.hidden_dim * self.kv_dim,
            "attention.v_proj": 2 * tokens * self.hidden_dim * self.kv_dim,
            "attention.scores": 2 * tokens * seq_len * self.hidden_dim,
            "attention.weighted_sum": 2 * tokens * seq_len * self.hidden_dim,
            "attention.o_proj": 2 * tokens * self.hidden_dim * self.hidden_dim,
            "mlp.gate_proj": 2 * tokens * self.hidden_dim * self.intermediate_dim,
            "mlp.up_proj": 2 * tokens * self.hidden_dim * self.intermediate_dim,
            "mlp.down_proj": 2 * tokens * self.intermediate_dim * self.hidden_dim,
        }
        if attention == "sdpa":  # one kernel does both
            per_layer["attention.sdpa"] = per_layer.pop("attention.scores") + per_layer.pop("attention.weighted_sum")
        flops = {component: self.n_layers * count for component, count in per_layer.items()}
        flops["lm_head"] = 2 * tokens * self.hidden_dim * self.vocab_size
        return flops

    def forward_flops(self, batch_size: int, seq_len: int) -> int:
        return sum(self.forward_flops_by_component(batch_size, seq_len).values())

    def step_flops(self, batch_size: int, seq_len: int) -> int:
        """Forward and backward.  Each product y = a b costs two of its size backward: one for a, one for b."""
        return 3 * self.forward_flops(batch_size, seq_len)

    def recomputed_flops(self, training: TrainingConfig) -> int:
        """What a step's backward passes compute again, no part of step_flops(): the scores, by fused attention; with
        checkpointing the products of every block but the last one, down_proj, whose output no operator asks for."""
        shape = (training.batch_size, training.seq_len)
        again = 0
        if training.attention == "sdpa":
            again += self.forward_flops_by_component(*shape)["attention.scores"]
        if training.activation_checkpointing:
            parts = self.forward_flops_by_component(*shape)
            again += sum(flops for part, flops in parts.items() if part not in ("mlp.down_proj", "lm_head"))
        return again


@dataclass(frozen=True)
class TrainingConfig:
    """How the model is trained, and where the files of the run go."""

    batch_size: int = flag(8, "samples per optimizer step and rank")
    seq_len: int = flag(128, "tokens per sample")
    num_steps: int = flag(50, "optimizer steps")
    learning_rate: float = flag(1e-4, "of AdamW")
    gradient_accumulation_steps: int = flag(1, "micro-batches that a step's samples are split into")
    precision: str = flag("fp32", "arithmetic, the last two by autocast", choices=list(PRECISIONS))
    attention: str = flag(
        "eager", "eager writes the scores to memory; sdpa is PyTorch's fused attention", choices=["eager", "sdpa"]
    )
    compile: bool = flag(False, "torch.compile the model, before step 1")
    activation_checkpointing: bool = flag(False, "keep the input of each block alone, compute the rest of it again")
    optimizer_impl: str | None = flag(
        None, "AdamW over lists of tensors, or in one kernel", choices=["foreach", "fused"], shown="PyTorch's choice"
    )
    device: str = flag(
        "auto", "cuda is a ROCm GPU too; auto takes a GPU if there is one", choices=["auto", "cuda", "cpu"]
    )
    data: str = flag("synthetic", "a text file to train on, byte by byte", metavar="FILE")
    seed: int = flag(42, "of weights and data", minimum=0)
    deterministic: bool = flag(False, "two runs give the same losses to the last digit")
    output_dir: str | None = flag(None, "folder of the run; without it or profiling nothing is written", metavar="DIR")
    log_interval: int = flag(1, "print every Nth step")
    force: bool = flag(False, "train even if the prediction says that memory will not suffice")


@dataclass(frozen=True)
class ProfilerConfig:
    """What is recorded beside the timings that every run takes."""

    enable_pytorch_profiler: bool = flag(False, "record a trace with torch.profiler")
    profile_dir: str | None = flag(
        None, "folder for traces and, alone, for the run", metavar="DIR", shown="--output-dir, else ./pytorch_profiles"
    )
    profile_steps: int = flag(5, "steps in the trace")
    warmup_steps: int = flag(5, "steps before them", minimum=0)
    profile_stacks: bool = flag(False, "Python stacks and modules in the trace, much larger; implies the profiler")
    profile_operators: bool = flag(False, "print what the trace says; implies the profiler")
    gzip: bool = flag(False, "compress the trace")
    profile_memory: bool = flag(False, "count every tensor of one step", alias="--enable-memory-profiling")
    memory_snapshot: bool = flag(False, "a GPU's allocation history of one step, for pytorch.org/memory_viz")
    system_profiler: bool = flag(False, "open the window to nsys or rocprofv3; set by run_system_profiler.sh")
    enable_deepspeed_flops: bool = flag(False, "DeepSpeed's FLOPs profiler on one step")
    flops_profile_step: int = flag(10, "which step")
    peak: str | float = flag(
        "auto",
        "what MFU is a share of: auto (the datasheet's figure, else a measured one), measured, or TFLOP/s",
        metavar="N",
        type=lambda text: peak_choice(text),
    )

    @property
    def records_trace(self) -> bool:
        return self.enable_pytorch_profiler or self.profile_stacks or self.profile_operators

    @property
    def enabled(self) -> bool:
        return self.records_trace or self.profile_memory or self.memory_snapshot or self.enable_deepspeed_flops


_SIZE_COLUMNS = (
    "vocab_size hidden_dim n_layers n_heads n_kv_heads intermediate_dim seq_len batch_size num_steps".split()
)
_SIZE_ROWS = {
    "tiny": (1000, 256, 4, 8, 4, 512, 128, 8, 50),
    "small": (1000, 512, 8, 8, 4, 1104, 256, 8, 50),
    "medium": (1000, 1024, 12, 16, 8, 3456, 512, 16, 100),
    "large": (1000, 2048, 16, 16, 8, 11136, 1024, 8, 100),
    "very_large": (1000, 4096, 24, 32, 16, 32128, 2048, 4, 100),
    # Widths and depths of the GPT family, full key/value heads, for the training benchmark.
    "gpt2-small": (10000, 768, 12, 12, 12, 3072, 128, 4, 50),
    "gpt2-medium": (10000, 1024, 24, 16, 16, 4096, 128, 4, 50),
    "gpt2-large": (10000, 1280, 36, 20, 20, 5120, 128, 4, 50),
    "gpt2-xl": (10000, 1600, 48, 25, 25, 6400, 128, 4, 50),
    "gpt3-2.7b": (10000, 2560, 32, 32, 32, 10240, 128, 4, 50),
}
SIZES = {name: dict(zip(_SIZE_COLUMNS, row, strict=True)) for name, row in _SIZE_ROWS.items()}
SIZE_ALIASES = {"med": "medium", "xl": "very_large", "verylarge": "very_large"}

# What a run leaves in its folder, so that an earlier run can be moved out of the way whole.
RUN_FILES = (
    "config.json performance_summary.json events.out.tfevents.* trace_step_*.json* operator_analysis*.json "
    "memory_timeline.* memory_snapshot_*.pickle memory_study.* prediction.json flops_profile.* "
    "computational_intensity.json roofline* report.html training_output.log training_output.*.log system_profile* "
    "training_benchmark.* attention_benchmark.* precision_study.* timing_study.*"
).split()
RUN_FOLDERS = ("rows", "snapshots")  # of sweeps


class UserError(Exception):
    """Something that the user can mend: printed as one line.  Exit code 2 for arguments, 1 for the rest."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM.  Not an Exception, so that nothing between here and main() takes it for an error."""

    def __init__(self, signum: int):
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


_interrupted_by: list[int] = []  # signals received; Python swallows what is raised inside a finalizer


# ---- Model ---------------------------------------------------------------------------------------------------------

# Objects with range_push(name) and range_pop() that want to know which part of the step is running: torch.cuda.nvtx on
# a GPU (NVTX, and ROCTX on ROCm), the memory ledger for the step that it watches.  torch.profiler is asked directly.
range_observers: list = []
_NO_RANGE = contextlib.nullcontext()


class _TraceRange:
    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None:
        self.record = torch.profiler.record_function(self.name) if torch.autograd._profiler_enabled() else None
        if self.record:
            self.record.__enter__()
        self.observers = tuple(range_observers)
        for observer in self.observers:
            observer.range_push(self.name)

    def __exit__(self, *exception) -> None:
        for observer in self.observers:
            observer.range_pop()
        if self.record:
            self.record.__exit__(*exception)


def trace_range(name: str):
    """Name a part of the step for whoever records.  Three looks and a shared empty context when nobody does.

    Compiled code has no parts any more: there the compiler finds nothing to trace.
    """
    if torch.compiler.is_compiling():
        return _NO_RANGE
    if range_observers or torch.autograd._profiler_enabled():
        return _TraceRange(name)
    return _NO_RANGE


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension, computed in float32 at any precision."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding, rotate-half convention: dimension i turns together with i + E/2."""

    def __init__(self, head_dim: int, max_seq_len: int, theta: float):
        super().__init__()
        inverse_frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.outer(torch.arange(max_seq_len).float(), inverse_frequency)  # [S, E/2]
        angles = torch.cat((angles, angles), dim=-1)  # [S, E]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, S, E] -> the same, turned by position."""
        seq_len = x.shape[2]
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
        return x * self.cos[:seq_len] + rotated * self.sin[:seq_len]


def repeat_kv(x: Tensor, n_heads: int) -> Tensor:
    """[B, K, S, E] -> [B, H, S, E]: a copy of each key/value head for each of the H/K query heads it serves."""
    batch_size, n_kv_heads, seq_len, head_dim = x.shape
    x = x[:, :, None].expand(-1, -1, n_heads // n_kv_heads, -1, -1)  # [B, K, H/K, S, E], no copy yet
    return x.reshape(batch_size, n_heads, seq_len, head_dim)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, part: str = "attention") -> Tensor:
    """softmax(q k' / sqrt(E) + mask) v with all [B, H, S, S] scores in memory: q [B, H, S, E], k and v [B, K, S, E],
    the mask [S, S] -> [B, H, S, E].  `part` is what its ranges are named after."""
    with trace_range(f"{part}.scores"):
        scores = (q * q.shape[-1] ** -0.5) @ repeat_kv(k, q.shape[1]).transpose(2, 3)  # [B, H, S, S]
        scores = scores if mask is None else scores + mask
    with trace_range(f"{part}.softmax"):
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)  # [B, H, S, S]
    with trace_range(f"{part}.weighted_sum"):
        return weights @ repeat_kv(v, q.shape[1])


def fused_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, part: str = "attention") -> Tensor:
    """The same by F.scaled_dot_product_attention, whose kernels never write the scores: PyTorch picks one of them.

    Key/value heads are copied as in eager attention, because in float32 the fused kernels of GPUs take no fewer.
    """
    with trace_range(f"{part}.sdpa"):
        n_heads = q.shape[1]
        return F.scaled_dot_product_attention(q, repeat_kv(k, n_heads), repeat_kv(v, n_heads), None, 0.0, causal)


class Attention(nn.Module):
    """Causal grouped-query attention, eager or fused."""

    def __init__(self, config: TinyLlamaConfig, rope: RotaryEmbedding, layer: int):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_dim, config.kv_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_dim, config.kv_dim, bias=False)
        self.o_proj = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
        self.rope = rope
        self.range = f"layers.{layer}.attention"

    def forward(self, x: Tensor, causal_mask: Tensor | None) -> Tensor:
        """[B, S, D] -> the same; fused where there is no mask to add."""
        batch_size, seq_len, hidden_dim = x.shape
        with trace_range(f"{self.range}.q_proj"):
            q = self.q_proj(x).view(batch_size, seq_len, self.n_heads, self.head_dim).transpose(1, 2)  # [B, H, S, E]
        with trace_range(f"{self.range}.k_proj"):
            k = self.k_proj(x).view(batch_size, seq_len, self.n_kv_heads, self.head_dim).transpose(1, 2)  # [B, K, S, E]
        with trace_range(f"{self.range}.v_proj"):
            v = self.v_proj(x).view(batch_size, seq_len, self.n_kv_heads, self.head_dim).transpose(1, 2)  # [B, K, S, E]
        with trace_range(f"{self.range}.rope"):
            q, k = self.rope(q), self.rope(k)
        if causal_mask is None:
            output = fused_attention(q, k, v, causal=True, part=self.range)  # [B, H, S, E]
        else:
            output = eager_attention(q, k, v, causal_mask[:seq_len, :seq_len], self.range)  # [B, H, S, E]
        with trace_range(f"{self.range}.o_proj"):
            output = output.transpose(1, 2).reshape(batch_size, seq_len, hidden_dim)  # [B, S, D]
            return self.o_proj(output)


class MLP(nn.Module):
    """SwiGLU feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: TinyLlamaConfig, layer: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
        self.up_proj = nn.Linear(config.hidden_dim, config.intermediate_dim, bias=False)
        self.down_proj = nn.Linear(config.intermediate_dim, config.hidden_dim, bias=False)
        self.range = f"layers.{layer}.mlp"

    def forward(self, x: Tensor) -> Tensor:
        with trace_range(f"{self.range}.gate_proj"):
            gate = self.gate_proj(x)  # [B, S, F]
        with trace_range(f"{self.range}.up_proj"):
            up = self.up_proj(x)  # [B, S, F]
        with trace_range(f"{self.range}.activation"):
            activated = F.silu(gate) * up  # [B, S, F]
        with trace_range(f"{self.range}.down_proj"):
            return self.down_proj(activated)  # [B, S, D]


class TransformerBlock(nn.Module):
    """Pre-norm residual block: attention, then feed-forward."""

    def __init__(self, config: TinyLlamaConfig, rope: RotaryEmbedding, layer: int):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_dim, config.norm_eps)
        self.attention = Attention(config, rope, layer)
        self.mlp_norm = RMSNorm(config.hidden_dim, config.norm_eps)
        self.mlp = MLP(config, layer)
        self.range = f"layers.{layer}"

    def forward(self, x: Tensor, causal_mask: Tensor | None) -> Tensor:
        with trace_range(f"{self.range}.attention_norm"):
            normed = self.attention_norm(x)
        attended = self.attention(normed, causal_mask)
        with trace_range(f"{self.range}.attention_residual"):
            x = x + attended
        with trace_range(f"{self.range}.mlp_norm"):
            normed = self.mlp_norm(x)
        fed_forward = self.mlp(normed)
        with trace_range(f"{self.range}.mlp_residual"):
            return x + fed_forward


class TinyLlamaModel(nn.Module):
    """The decoder: input_ids [B, S] -> logits [B, S, V]; with labels [B, S] also the mean next-token loss.

    labels[b, s] is the token that follows input_ids[b, s]; nothing is shifted here.
    """

    def __init__(self, config: TinyLlamaConfig, attention: str = "eager", activation_checkpointing: bool = False):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.rope = RotaryEmbedding(config.head_dim, config.max_seq_len, config.rope_theta)
        self.layers = nn.ModuleList(TransformerBlock(config, self.rope, layer) for layer in range(config.n_layers))
        self.norm = RMSNorm(config.hidden_dim, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_dim, config.vocab_size, bias=False)
        mask = None  # fused attention knows by itself what is causal
        if attention == "eager":
            mask = torch.full((config.max_seq_len, config.max_seq_len), float("-inf")).triu(1)  # [S, S], 0 on and below
        self.register_buffer("causal_mask", mask, persistent=False)
        self.activation_checkpointing = activation_checkpointing
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=config.init_std)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None):
        if input_ids.shape[1] > self.config.max_seq_len:
            raise ValueError(f"{input_ids.shape[1]} tokens, but max_seq_len is {self.config.max_seq_len}")
        with trace_range("embedding"):
            x = self.embedding(input_ids)  # [B, S, D]
        for layer in self.layers:
            if self.activation_checkpointing:
                x = checkpoint(layer, x, self.causal_mask, use_reentrant=False, preserve_rng_state=False)  # no dropout
            else:
                x = layer(x, self.causal_mask)
        with trace_range("norm"):
            x = self.norm(x)
        with trace_range("lm_head"):
            logits = self.lm_head(x)  # [B, S, V]
        if labels is None:
            return logits
        with trace_range("loss"):
            loss = F.cross_entropy(logits.float().view(-1, self.config.vocab_size), labels.reshape(-1))
        return logits, loss


# ---- Data ----------------------------------------------------------------------------------------------------------


def synthetic_corpus(vocab_size: int, training: TrainingConfig) -> np.ndarray:
    """A token stream with something to learn: integers from a bigram source, 2^18 of them or more.

    Token frequencies follow the Zipf-Mandelbrot law of natural text, 1 / (rank + 2.7).  Four times in five the next
    token is one of eight successors that the current token always has, the first the likeliest; else it is drawn
    afresh from the frequencies.
    """
    length = max(2**18, 64 * (training.seq_len + 1))
    rng = np.random.default_rng(training.seed)
    frequency = 1.0 / (2.7 + rng.permutation(vocab_size))
    frequency /= frequency.sum()
    successors = rng.choice(vocab_size, size=(vocab_size, 8), p=frequency)
    preference = 1.0 / np.arange(1, 9)
    chains = 256  # independent walks through the source, stepped together, laid end to end
    steps = math.ceil(length / chains)
    fresh = rng.choice(vocab_size, size=(steps, chains), p=frequency)
    choice = rng.choice(8, size=(steps, chains), p=preference / preference.sum())
    follows = rng.random((steps, chains)) < 0.8
    tokens = np.empty((steps, chains), dtype=np.int32)
    tokens[0] = fresh[0]
    for i in range(1, steps):
        tokens[i] = np.where(follows[i], successors[tokens[i - 1], choice[i]], fresh[i])
    return tokens.T.reshape(-1)[:length]


def text_corpus(path: str, vocab_size: int, seq_len: int) -> np.ndarray:
    """The bytes of a text file as tokens.  Mapped, not read: a corpus may be larger than the memory."""
    try:
        size = os.path.getsize(path)
        if size < seq_len + 1:
            raise UserError(
                f"--data {path}: {size} bytes are less than one sample of --seq-len {seq_len} and its next byte; "
                f"give a longer file or a shorter --seq-len",
                exit_code=2,
            )
        tokens = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise UserError(f"--data {path}: {error.strerror}; give a text file", exit_code=2) from error
    if not tokens[: 1 << 16].all():
        raise UserError(f"--data {path}: holds NUL bytes, so it is no text; give a text file", exit_code=2)
    if vocab_size < 256 and (largest := int(tokens.max())) >= vocab_size:
        raise UserError(
            f"--vocab-size {vocab_size}: {path} holds the byte {largest}; give 256 or more with --data", exit_code=2
        )
    return tokens


def batches(corpus: np.ndarray, training: TrainingConfig, device: torch.device, rank: int = 0):
    """Endless (input_ids, labels), each [micro-batch, S] int64 on the device; labels are the next tokens.

    Windows start at random places; ranks draw from streams of their own.  On a GPU the copy starts from pinned
    memory and nothing waits for it.
    """
    rng = np.random.default_rng([training.seed, rank])
    window = np.arange(training.seq_len + 1)
    micro_batch_size = training.batch_size // training.gradient_accumulation_steps
    while True:
        starts = rng.integers(0, len(corpus) - training.seq_len, size=micro_batch_size)
        tokens = torch.from_numpy(corpus[starts[:, None] + window].astype(np.int64))  # [B, S + 1]
        if device.type == "cuda":
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# ---- Measurement ---------------------------------------------------------------------------------------------------

PHASES = ("data", "forward", "backward", "optimizer")


@dataclass
class StepRecord:
    """One step: marks while it runs, numbers once the device has finished it."""

    step: int
    marks: list = field(default_factory=list)  # (name of the phase that ends here, CUDA event or seconds)
    losses: list[Tensor] = field(default_factory=list)  # one 0-d tensor per micro-batch, on its way to the host
    phase_ms: dict[str, float] = field(default_factory=dict)
    total_ms: float = math.nan
    loss: float = math.nan
    ended_at: float = math.nan  # wall clock, seconds since the epoch
    memory_bytes: int = 0  # the last sample before the step was read


class StepMeter:
    """Times the phases of every step without making the device wait.

    On a GPU the marks are events in the stream, read when the device has passed them; only a step that is to be
    printed is waited for.  On a CPU they are perf_counter readings.  Phases touch: they add up to the step.
    """

    def __init__(self, device: torch.device, world_size: int, wait_for, on_record):
        self.on_gpu = device.type == "cuda"
        self.world_size = world_size
        self.wait_for = wait_for  # step number -> bool
        self.on_record = on_record  # called with each finished StepRecord, in order
        self.records: list[StepRecord] = []
        self._pending: list[StepRecord] = []

    def _mark(self, name: str) -> None:
        mark = torch.cuda.Event(enable_timing=True) if self.on_gpu else time.perf_counter()
        if self.on_gpu:
            mark.record()
        self._current.marks.append((name, mark))

    @contextlib.contextmanager
    def step(self, step: int):
        self._current = StepRecord(step)
        self._mark("start")
        yield
        self._current.ended_at = time.time()
        self._pending.append(self._current)
        self.read_finished(wait=self.wait_for(step))

    @contextlib.contextmanager
    def phase(self, name: str):
        with trace_range(name):
            yield
        self._mark(name)

    def add_loss(self, loss: Tensor) -> None:
        """Keep a micro-batch's loss, the mean over ranks.  A copy to the host that nothing waits for yet."""
        loss = loss.detach()
        if self.world_size > 1:
            loss = loss / self.world_size
            torch.distributed.all_reduce(loss)
        self._current.losses.append(loss.to("cpu", non_blocking=True))

    def read_finished(self, wait: bool) -> None:
        """Turn the marks of finished steps into numbers.  Raises FloatingPointError at a loss that is none."""
        while self._pending:
            record = self._pending[0]
            if self.on_gpu and wait:
                record.marks[-1][1].synchronize()
            elif self.on_gpu and not record.marks[-1][1].query():
                return
            self._pending.pop(0)
            for (_, start), (name, end) in itertools.pairwise(record.marks):
                elapsed_ms = start.elapsed_time(end) if self.on_gpu else 1e3 * (end - start)
                record.phase_ms[name] = record.phase_ms.get(name, 0.0) + elapsed_ms
            record.total_ms = sum(record.phase_ms.values())
            record.loss = sum(loss.item() for loss in record.losses) / len(record.losses)
            record.marks, record.losses = [], []
            self.records.append(record)
            self.on_record(record)
            if not math.isfinite(record.loss):
                raise FloatingPointError(f"the loss is {record.loss} at step {record.step}")


def statistics(values: list[float]) -> dict[str, float | int | None]:
    """Mean, median, sample standard deviation (None for one value), 95th percentile, count; None for no values."""
    names = ("mean", "median", "std", "p95")
    if not values:
        return dict.fromkeys(names) | {"count": 0}
    std = np.std(values, ddof=1).item() if len(values) > 1 else None
    figures = (np.mean(values).item(), np.median(values).item(), std, np.percentile(values, 95).item())
    return dict(zip(names, figures, strict=True)) | {"count": len(values)}


def host_memory() -> tuple[int, int]:
    """Resident bytes of this process: now, and at most.  Where there is no /proc only the peak is known."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines["VmRSS"].split()[0]) * 1024, int(lines["VmHWM"].split()[0]) * 1024
    except FileNotFoundError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return peak, peak


class DeviceSampler(threading.Thread):
    """Reads memory and GPU utilisation ten times a second, beside the training thread."""

    def __init__(self, device: torch.device):
        super().__init__(daemon=True)
        self.device, self.on_gpu = device, device.type == "cuda"
        self.memory_bytes: list[int] = []
        self.peak_bytes: int | None = None
        self.memory_source = (
            "bytes allocated to tensors by PyTorch's caching allocator"
            if self.on_gpu
            else "resident set of the process, libraries included (--profile-memory counts the tensors alone)"
        )
        self.utilization_percent: list[int] = []
        self.utilization_reason = None if self.on_gpu else "no GPU in use"
        self._stop_requested = threading.Event()

    def sample(self) -> None:
        self.memory_bytes.append(torch.cuda.memory_allocated(self.device) if self.on_gpu else host_memory()[0])
        if self.utilization_reason is None:
            try:
                self.utilization_percent.append(int(torch.cuda.utilization(self.device)))
            except Exception as error:  # noqa: BLE001 - the drivers' libraries raise exceptions of their own
                self.utilization_reason = f"torch.cuda.utilization: {first_line(error)}"

    def run(self) -> None:
        while not self._stop_requested.wait(0.1):
            self.sample()

    def __enter__(self) -> DeviceSampler:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.sample()
        self.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop_requested.set()
        self.join()
        self.sample()
        self.peak_bytes = torch.cuda.max_memory_allocated(self.device) if self.on_gpu else host_memory()[1]


# ---- Profiler integration ------------------------------------------------------------------------------------------


class Plan:
    """Which steps carry an instrument.  No step carries two while there are others to choose from."""

    def __init__(self, num_steps: int, profiling: ProfilerConfig):
        self.window = None  # the trace, or what a system profiler sees, holds steps window[0] + 1 to window[1]
        self.flops_step = self.memory_step = self.snapshot_step = None
        self.notes: list[str] = []
        if profiling.records_trace or profiling.system_profiler:
            asked = (profiling.warmup_steps, profiling.warmup_steps + profiling.profile_steps)
            last, length = min(asked[1], num_steps), profiling.profile_steps
            if others := profiling.enable_deepspeed_flops + profiling.profile_memory + profiling.memory_snapshot:
                # Left for the first step, one for each other instrument, the profiler's warm-up, two for the averages.
                length = max(1, min(length, num_steps - others - 4))
            self.window = first, last = max(0, last - length), last
            if self.window != asked:
                moved = f"{asked[0]}-{asked[1]} does not fit in {num_steps}" + " beside the rest" * bool(others)
                self.notes.append(f"Profiling window moved to steps {first}-{last}: {moved}")
        if profiling.enable_deepspeed_flops:
            asked = profiling.flops_profile_step
            self.flops_step = self._free_step(min(asked, num_steps), num_steps)
            if self.flops_step != asked:
                why = f"the run has {num_steps} steps" if asked > num_steps else "a step carries one instrument"
                self.notes.append(f"FLOPs profile moved from step {asked} to {self.flops_step}: {why}")
        if profiling.profile_memory:
            self.memory_step = self._free_step(2, num_steps)
        if profiling.memory_snapshot:
            self.snapshot_step = self._free_step(2, num_steps)

    def _free_step(self, wanted: int, num_steps: int) -> int:
        """The step nearest to the wanted one that carries nothing yet; the first or a warm-up, else the last step."""
        for free in ((None,), ("first", "profiler warm-up")):
            for distance in range(num_steps):
                for step in (wanted + distance, wanted - distance):
                    if 1 <= step <= num_steps and self.left_out(step) in free:
                        return step
        return num_steps

    def left_out(self, step: int) -> str | None:
        """Why this step is no part of the averages, or None."""
        if self.window and self.window[0] < step <= self.window[1]:
            return "profiled"
        counted = {self.flops_step: "FLOPs counted", self.memory_step: "memory counted", self.snapshot_step: "snapshot"}
        if step in counted:
            return counted[step]
        if step == 1:
            return "first"
        return "profiler warm-up" if self.window and step == self.window[0] else None


class TraceRecorder:
    """torch.profiler over the planned window.  The trace gets its name when it is complete."""

    def __init__(self, profiling: ProfilerConfig, window: tuple[int, int], on_gpu: bool, folder: Path, suffix: str):
        self.folder, self.suffix = folder, suffix + ".pt.trace.json" + (".gz" if profiling.gzip else "")
        self.first, self.last = window
        self.steps_seen = 0
        self.path: Path | None = None  # of the finished trace
        activity = torch.profiler.ProfilerActivity
        warmup = min(self.first, 1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Profiler won't be using warmup")  # the window says as much
            active = self.last - self.first
            schedule = torch.profiler.schedule(wait=self.first - warmup, warmup=warmup, active=active, repeat=1)
        self.profile = torch.profiler.profile(
            activities=[activity.CPU, activity.CUDA] if on_gpu else [activity.CPU],
            schedule=schedule,
            on_trace_ready=self.export,
            record_shapes=True,  # FLOPs follow from them; with_flops would slow a CPU's steps and leaves no trace
            with_stack=profiling.profile_stacks,  # and with it the calls of nn.Modules
            profile_memory=profiling.profile_memory,
        )

    def step(self) -> None:
        self.steps_seen += 1
        self.profile.step()

    def export(self, profile: torch.profiler.profile) -> None:
        last = min(self.last, self.steps_seen)
        path = self.folder / f"trace_step_{self.first}_{last}{self.suffix}"
        partial = path.with_name(f".{path.name.removesuffix('.gz')}.partial")
        profile.export_chrome_trace(str(partial))
        tail = b""
        with contextlib.suppress(FileNotFoundError), partial.open("rb") as file:
            file.seek(max(0, partial.stat().st_size - 64))
            tail = file.read().rstrip()
        if not tail.endswith(b"}"):  # the exporter does not tell of a full disk
            partial.unlink(missing_ok=True)
            raise UserError(f"cannot write {path}: the trace came out incomplete; is the disk full?")
        if path.suffix == ".gz":
            partial = compressed(partial)
        partial.replace(path)
        self.path = path


class SystemProfilerWindow:
    """Opens the planned window to the profiler that this process was started by: nsys listens to cudaProfilerStart and
    Stop, rocprofv3 to roctxProfilerResume and Pause, which it loads into the process itself."""

    def __init__(self, window: tuple[int, int], device: torch.device):
        self.first, self.last, self.device = *window, device
        self.open, self.close = torch.cuda.profiler.start, torch.cuda.profiler.stop
        if torch.version.hip:
            try:
                self.open, self.close = (
                    functools.partial(self._roctx, getattr(ctypes.CDLL(None), f"roctxProfiler{name}"))
                    for name in ("Resume", "Pause")
                )
            except AttributeError as missing:
                raise UserError("--system-profiler: not started by rocprofv3; use run_system_profiler.sh") from missing

    @staticmethod
    def _roctx(function) -> None:
        function.argtypes = [ctypes.c_uint64]
        if function(0):  # of all threads
            raise UserError(f"--system-profiler: {function.__name__} failed; is it rocprofv3 --selected-regions?")

    @contextlib.contextmanager
    def step(self, step: int):
        """The device has finished what is not of the window when it opens, and what is when it closes."""
        if step == self.first + 1:
            synchronize(self.device)
            self.open()
        yield
        if step == self.last:
            synchronize(self.device)
            self.close()


def compressed(path: Path) -> Path:
    """The file as <path>.gz instead."""
    target = path.with_name(path.name + ".gz")
    try:
        with path.open("rb") as source, gzip.open(target, "wb", compresslevel=6) as file:
            shutil.copyfileobj(source, file)
    except OSError:
        target.unlink(missing_ok=True)
        raise
    finally:
        path.unlink()
    return target


class Instruments:
    """Everything optional that a step can carry, so that the training loop need not know what it is."""

    def __init__(self, plan: Plan, profiling, model, optimizer, device, report: Report, rank_suffix: str):
        self.plan, self.on_gpu, folder = plan, device.type == "cuda", report.trace_folder
        self.trace = self.memory = self.flops = self.snapshot = self.outer = None
        if profiling.records_trace:
            self.trace = TraceRecorder(profiling, plan.window, self.on_gpu, folder, rank_suffix)
        if profiling.system_profiler:
            self.outer = SystemProfilerWindow(plan.window, device)
        if plan.memory_step:
            from analysis.memory import MemoryLedger

            self.memory = MemoryLedger(model, optimizer, plan.memory_step, range_observers)
        if plan.snapshot_step:
            from analysis.memory import MemorySnapshot

            self.snapshot = MemorySnapshot(report.folder if report.rank == 0 else None)
        if plan.flops_step:
            from analysis.counting import DeepSpeedCounter

            self.flops = DeepSpeedCounter(model, plan.flops_step, report.folder if report.rank == 0 else None)

    @contextlib.contextmanager
    def run(self):
        if self.on_gpu:
            range_observers.append(torch.cuda.nvtx)
        try:
            with self.trace.profile if self.trace else contextlib.nullcontext():
                yield
        finally:
            range_observers.clear()

    @contextlib.contextmanager
    def step(self, step: int):
        with (
            self.outer.step(step) if self.outer else contextlib.nullcontext(),
            self.memory if step == self.plan.memory_step else contextlib.nullcontext(),
            self.snapshot if step == self.plan.snapshot_step else contextlib.nullcontext(),
        ):
            yield
        if self.trace:
            self.trace.step()

    @contextlib.contextmanager
    def forward(self, step: int):
        with self.flops if step == self.plan.flops_step else contextlib.nullcontext():
            yield
        if step == self.plan.snapshot_step:
            self.snapshot.after_forward()


# ---- Training loop -------------------------------------------------------------------------------------------------


def train(model, optimizer, scaler, autocast, stream, training: TrainingConfig, meter: StepMeter, instruments):
    """The training loop.  Phases are timed where they are named; whatever else a step carries hangs on its contexts."""
    micro_steps = training.gradient_accumulation_steps
    for step in range(1, training.num_steps + 1):
        if _interrupted_by:
            raise Interrupted(_interrupted_by[-1])
        with meter.step(step), instruments.step(step):
            for micro_step in range(1, micro_steps + 1):
                with meter.phase("data"):
                    input_ids, labels = next(stream)  # [B / micro_steps, S] each
                with synchronised(model, micro_step == micro_steps):
                    with meter.phase("forward"), instruments.forward(step), autocast:
                        loss = model(input_ids, labels)[1]  # the logits are not named, so that they can be freed
                    with meter.phase("backward"):
                        scaler.scale(loss / micro_steps).backward()
                meter.add_loss(loss)
            with meter.phase("optimizer"):
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)


def synchronised(model: nn.Module, last_micro_step: bool):
    """Ranks exchange gradients in the last backward pass of a step; those before only add to them locally."""
    return contextlib.nullcontext() if last_micro_step or not hasattr(model, "no_sync") else model.no_sync()


def build(config: TinyLlamaConfig, training: TrainingConfig, device: torch.device):
    """(model, optimizer, gradient scaler, autocast) of a run, on the device, not compiled."""
    model = TinyLlamaModel(config, training.attention, training.activation_checkpointing)
    model = model.to(device) if device.type != "cpu" else model  # tensors without data cannot be moved
    impl = {training.optimizer_impl: True} if training.optimizer_impl else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate, **impl)
    scaler = torch.amp.GradScaler(device.type, enabled=training.precision == "fp16")
    dtype = PRECISIONS[training.precision]
    return model, optimizer, scaler, torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Compilation:
    """torch.compile of a model before its first step: how long it takes, and what a pass takes before and after.

    All of it by forward and backward passes that leave no gradients: what is trained afterwards is the same as ever.
    """

    PASSES = 3  # timed ones before and after; one more of each comes first

    def __init__(self, model: nn.Module, autocast, stream, device: torch.device, traced: bool):
        self.model, self.autocast, self.stream, self.device = model, autocast, stream, device
        from torch._dynamo import exc, utils  # takes seconds

        self._pass_ms()
        self.eager_ms = [self._pass_ms() for _ in range(self.PASSES)]
        utils.counters.clear()
        # A trace shows a GPU's kernels anyway; a CPU's only if the generated code announces them.
        model.compile(dynamic=False, options={"cpp.enable_kernel_profile": traced and device.type == "cpu"})
        try:
            first_ms = self._pass_ms()
        except exc.TorchDynamoException as error:
            raise UserError(f"--compile: this model cannot be compiled here: {cause_of(error)}") from error
        self.compiled_ms = [self._pass_ms() for _ in range(self.PASSES)]
        self.compile_s = max(0.0, first_ms - statistics(self.compiled_ms)["median"]) / 1e3
        found = utils.counters["inductor"]
        self.from_cache = bool(found["fxgraph_cache_hit"]) and not found["fxgraph_cache_miss"]

    def _pass_ms(self) -> float:
        """Wall milliseconds of one forward and backward pass over a micro-batch."""
        input_ids, labels = next(self.stream)
        synchronize(self.device)
        started = time.perf_counter()
        with self.autocast:
            loss = self.model(input_ids, labels)[1]
        loss.backward()
        synchronize(self.device)
        elapsed_ms = 1e3 * (time.perf_counter() - started)
        self.model.zero_grad(set_to_none=True)
        return elapsed_ms

    def document(self, micro_steps: int) -> dict:
        """Medians of passes, what they save in a step of so many, and how many steps pay for the compilation."""
        eager_ms, compiled_ms = (statistics(values)["median"] for values in (self.eager_ms, self.compiled_ms))
        saved_ms = micro_steps * (eager_ms - compiled_ms)
        document = {
            "compile_s": self.compile_s,
            "from_cache": self.from_cache,
            "eager_pass_ms": eager_ms,
            "compiled_pass_ms": compiled_ms,
            "passes": self.PASSES,
            "saved_ms_per_step": saved_ms,
            "steps_to_pay_off": math.ceil(1e3 * self.compile_s / saved_ms) if saved_ms > 0 else None,
        }
        return with_reasons(document, "a compiled pass was not faster")


def cause_of(error: BaseException) -> str:
    """The line of a compiler's error that says what is wrong: it wraps one error in others, and adds advice."""
    inner = getattr(error, "inner_exception", None) or error.__cause__
    return cause_of(inner) if inner else f"{type(error).__name__}: {first_line(error)}"


def choose_device(asked: str) -> torch.device:
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        build = "ROCm" if torch.version.hip else "CUDA" if torch.version.cuda else "CPU-only"
        cure = "install a ROCm or CUDA build" if build == "CPU-only" else "check what rocm-smi or nvidia-smi says"
        raise UserError(
            f"--device cuda: PyTorch {torch.__version__} ({build}) sees no GPU; {cure}, or use --device cpu"
        )
    local_rank, visible = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local_rank >= visible:
        raise UserError(f"LOCAL_RANK is {local_rank}, but {visible} GPUs are visible; start fewer processes per node")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def check_precision(precision: str, device: torch.device, option: str = "--precision") -> None:
    """Refuse what this device would only pretend to compute in."""
    refusal = None
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            refusal = f"{gpu.name} has no bfloat16 arithmetic; use fp16 or fp32"
        if precision == "tf32" and not (gpu.gcnArchName.startswith("gfx94") if torch.version.hip else gpu.major >= 8):
            refusal = f"{gpu.name} has no TF32 matrix units; use fp32, or bf16 or fp16"
    elif precision == "tf32":
        refusal = "TF32 is a format of GPU matrix units; on a CPU use fp32 or bf16"
    elif precision == "fp16" and not cpu_trains_in_fp16():
        refusal = f"PyTorch {torch.__version__} cannot train in fp16 on this CPU; use fp32 or bf16"
    if refusal:
        raise UserError(f"{option} {precision}: {refusal}", exit_code=2)


def cpu_trains_in_fp16() -> bool:
    """Try a product forward and backward under autocast: some builds refuse, older ones silently skip it."""
    weight = torch.ones(2, 2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.autocast("cpu", dtype=torch.float16):
                product = weight @ torch.ones(2, 2)
            product.sum().backward()
        except RuntimeError:
            return False
    return product.dtype is torch.float16


def total_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(config: TinyLlamaConfig, training: TrainingConfig, device: torch.device) -> None:
    """Stop before allocations that cannot succeed: on a CPU the kernel would kill the process without a word.

    A lower bound in closed form says when it is worth asking for a prediction: weight, gradient and two Adam moments of
    four bytes each, the mask, and the attention weights that every layer keeps, or one at a time with checkpointing.
    """
    squares = 0  # bytes for each of the S x S places of mask and scores
    if training.attention == "eager":
        layers = 1 if training.activation_checkpointing else config.n_layers
        scores = layers * config.n_heads * training.batch_size // training.gradient_accumulation_steps
        squares = 4 + PRECISIONS[training.precision].itemsize * scores
    needed = 16 * config.parameter_count() + squares * training.seq_len**2
    if training.force or needed < total_memory(device) / 8:
        return
    if importlib.util.find_spec("analysis"):
        from analysis.prediction import refusal

        if why := refusal(config, training, device):
            raise UserError(f"out of memory: {why}; --force trains all the same")
    elif needed > total_memory(device):
        raise UserError(
            f"out of memory: {config.parameter_count():,} parameters with gradients, Adam moments and attention "
            f"weights need more than {needed / MB:,.0f} MB, {device.type} has {total_memory(device) / MB:,.0f} MB; "
            "lower --size, --batch-size or --seq-len"
        )


def set_numerics(training: TrainingConfig) -> None:
    """Seed, determinism and the precision of float32 products, whatever they were before."""
    torch.manual_seed(training.seed)
    torch.set_float32_matmul_precision("high" if training.precision == "tf32" else "highest")
    if training.precision == "tf32" and torch.version.hip:
        os.environ.setdefault("HIPBLASLT_ALLOW_TF32", "1")  # older ROCm builds ask for it too
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(training.deterministic)


@contextlib.contextmanager
def process_group(device: torch.device):
    """Under torchrun, join the other processes; yields (rank, world size)."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        yield 0, 1
        return
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield torch.distributed.get_rank(), world_size
    finally:
        torch.distributed.destroy_process_group()


def run(config: TinyLlamaConfig, training: TrainingConfig, profiling: ProfilerConfig, size: str | None = None) -> None:
    """One run: check, announce, train, report.  What goes wrong is raised, and becomes one line in main()."""
    device = choose_device(training.device)
    check_precision(training.precision, device)
    if profiling.memory_snapshot and device.type == "cpu":
        raise UserError(
            "--memory-snapshot: the history of allocations is that of a GPU's allocator; on a CPU --profile-memory "
            "tells its tensors, and run_memory_study.sh how they grow"
        )
    if profiling.system_profiler and device.type == "cpu":
        raise UserError("--system-profiler: nsys and rocprofv3 watch a GPU, and none is in use")
    check_packages(training, profiling, device)
    set_numerics(training)
    text = None if training.data == "synthetic" else text_corpus(training.data, config.vocab_size, training.seq_len)
    plan = Plan(training.num_steps, profiling)
    with process_group(device) as (rank, world_size):
        report = Report(config, training, profiling, plan, device, rank, world_size, size)
        report.open()
        try:
            report.announce()
            check_memory(config, training, device)
            corpus = synthetic_corpus(config.vocab_size, training) if text is None else text
            model, optimizer, scaler, autocast = build(config, training, device)
            if training.compile:
                say("Compiling the model...")
                stream = batches(corpus, training, device, rank)
                report.compilation = Compilation(model, autocast, stream, device, profiling.records_trace)
            suffix = f"_rank{rank}" if world_size > 1 else ""
            instruments = Instruments(plan, profiling, model, optimizer, device, report, suffix)
            report.instruments = instruments
            if world_size > 1:
                devices = [device] if device.type == "cuda" else None
                model = nn.parallel.DistributedDataParallel(model, devices, broadcast_buffers=False)
            stream = batches(corpus, training, device, rank)
            with report.sampler, instruments.run():
                train(model, optimizer, scaler, autocast, stream, training, report.meter, instruments)
            report.meter.read_finished(wait=True)
            if world_size > 1:
                torch.distributed.barrier()  # rank 0 reads the traces of all
        except BaseException as error:
            told = report.with_prediction(error)
            report.close(told)
            if told is error:
                raise
            raise told from error
        report.close(None)


# ---- Reporting -----------------------------------------------------------------------------------------------------

PACKAGES = {  # and what needs them
    "torch": "everything",
    "numpy": "everything",
    "tensorboard": "any run that leaves a folder",
    "torch-tb-profiler": "TensorBoard's PYTORCH_PROFILER tab",
    "deepspeed": "--enable-deepspeed-flops",
    "matplotlib": "figures",
}


def chosen_impl(device: torch.device) -> str:
    """How PyTorch runs AdamW if it is not told."""
    return "foreach" if device.type == "cuda" else "one tensor after another"


def is_first_rank() -> bool:
    """Under torchrun rank 0 alone speaks, and writes what all share."""
    return os.environ.get("RANK", "0") == "0"


def say(*lines: str) -> None:
    """Print for the user."""
    if lines and is_first_rank():
        print(*lines, sep="\n", flush=True)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def version_of(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def require(what: str, modules: list[str]) -> None:
    """Raise UserError if one is missing, before any work is done for nothing."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            ours = module in ("analysis", "studies")
            cure = "the folder that lies beside this script" if ours else f"pip install {module}"
            raise UserError(f"{what} needs {module}, which is missing: {cure}")


def check_packages(training: TrainingConfig, profiling: ProfilerConfig, device: torch.device) -> None:
    """What the flags need must be there before training starts, not when it ends."""
    needs = (
        ("a run folder", bool(training.output_dir) or profiling.enabled, ["tensorboard"]),
        ("--profile-memory", profiling.profile_memory, ["analysis"]),
        ("--memory-snapshot", profiling.memory_snapshot, ["analysis"]),
        ("--profile-operators", profiling.profile_operators, ["analysis", "orjson", "pandas"]),
        ("--enable-deepspeed-flops", profiling.enable_deepspeed_flops, ["analysis"]),
    )
    for what, wanted, modules in needs:
        require(what, modules if wanted else [])
    if profiling.enable_deepspeed_flops and (problem := deepspeed_problem(device)):
        raise UserError(f"--enable-deepspeed-flops: {problem}")


def deepspeed_problem(device: torch.device) -> str | None:
    """Why DeepSpeed cannot count on this device, or None."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is missing: pip install deepspeed"
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # or it guesses, and prints that it does
    try:
        importlib.import_module("deepspeed.profiling.flops_profiler")
    except Exception as error:  # noqa: BLE001 - the import probes compilers and drivers, and raises whatever they do
        return f"DeepSpeed does not import: {first_line(error)}"
    return None


def write_json(path: Path, document: dict) -> None:
    """Write the file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w") as file:
            file.write(json.dumps({"schema_version": SCHEMA_VERSION} | document, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def prepare_folder(folder: Path) -> None:
    """Make the folder, see that it takes files, and move a run that it already holds to earlier_<timestamp>/ in it.

    A launcher's log is being written while this runs: it is named in TINY_LLAMA_LOG, and stays.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".write_test"
        try:
            probe.write_bytes(bytes(4096))
        finally:
            probe.unlink(missing_ok=True)
        log = Path(os.environ.get("TINY_LLAMA_LOG", "")).absolute()
        config = folder / "config.json"
        if config.exists() and b'"schema_version"' not in config.read_bytes():
            raise UserError(f"{config} is of no run of this script; give another folder")
        patterns = RUN_FILES if config.exists() else ["trace_step_*.json*", "prediction.json"]
        earlier = [f for pattern in patterns for f in folder.glob(pattern) if f.is_file() and f.absolute() != log]
        earlier += [f for name in RUN_FOLDERS if earlier and (f := folder / name).is_dir()]
        if earlier:
            stamp = datetime.fromtimestamp(max(f.stat().st_mtime for f in earlier)).strftime("%Y%m%d_%H%M%S")
            names = (f"earlier_{stamp}" + (f"_{n}" if n > 1 else "") for n in itertools.count(1))
            target = next(folder / name for name in names if not (folder / name).exists())
            target.mkdir()
            for file in earlier:
                file.rename(target / file.name)
            say(f"The run that {folder} held is now in {target}")
    except OSError as error:
        raise UserError(f"cannot write to folder {folder}: {error.strerror}") from error


def describe_environment(device: torch.device) -> dict:
    """Versions, device, host, commit and command line: enough to repeat the run."""

    def git(*command: str) -> str | None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            arguments = ["git", "-C", str(Path(__file__).resolve().parent), *command]
            return subprocess.run(arguments, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
        return None

    relevant = ("OMP_", "MKL_", "PYTORCH_", "CUDA_VISIBLE", "HIP_", "ROCR_", "HSA_", "NCCL_", "SLURM_JOB")
    commit, about = git("rev-parse", "HEAD"), {"type": device.type, "name": cpu_name()}
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        arch = gpu.gcnArchName if torch.version.hip else f"sm_{gpu.major}{gpu.minor}"
        about |= {"name": gpu.name, "arch": arch, "compute_units": gpu.multi_processor_count}
        about["memory_bytes"] = gpu.total_memory
    environment = {
        "timestamp": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command_line": shlex.join([Path(sys.executable).name, *sys.argv]),
        "commit": commit,
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no")) if commit else None,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {package: version_of(package) for package in PACKAGES},
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "device": about,
        "cpu": {"name": cpu_name(), "logical_cores": os.cpu_count(), "torch_threads": torch.get_num_threads()},
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(relevant)},
    }
    reasons = {"hip": "not a ROCm build", "cuda": "not a CUDA build"}
    return with_reasons(environment, "the script is in no git checkout, or git is missing", **reasons)


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def with_reasons(values: dict, reason: str, **reasons: str) -> dict:
    """A copy in which each unknown value, None, has its <name>_reason beside it."""
    out = {}
    for name, value in values.items():
        out[name] = value
        if value is None:
            out[f"{name}_reason"] = reasons.get(name, reason)
    return out


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def out_of_memory(error: BaseException) -> bool:
    """Of a GPU or of the host, also where a library or the compiler tells of it in its own way."""
    cause = getattr(error, "inner_exception", None) or error.__cause__
    if isinstance(error, UserError) or (cause is not None and out_of_memory(cause)):
        return cause is not None and out_of_memory(cause)
    signs = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(sign in first_line(error) for sign in signs)


def explain(error: BaseException) -> tuple[str, int]:
    """The one line and the exit code for an error, wherever it came from."""
    text = first_line(error)
    if isinstance(error, (UserError, Interrupted)):
        return text, error.exit_code
    if isinstance(error, FloatingPointError):
        return f"{text}; lower --learning-rate, or use another --precision", 1
    if out_of_memory(error):
        asked = text.split("allocate memory: ")[-1]
        has = "" if "GPU" in text else f"; the machine has {total_memory(torch.device('cpu')) / MB:,.0f} MB"
        return f"out of memory: {asked}{has}; lower --batch-size, --seq-len or --size", 1
    if isinstance(error, BrokenPipeError):
        return "standard output was closed before the run ended", 1
    if isinstance(error, OSError):
        return f"cannot use {error.filename or 'standard output'}: {error.strerror or text}", 1
    return f"{type(error).__name__}: {text} (TINY_LLAMA_DEBUG=1 shows where)", 1


class Report:
    """What a run says and leaves behind, however it ends: step lines, summary, files, TensorBoard events."""

    FLUSH_S = 10.0  # TensorBoard scalars are written between steps, this far apart: writing them takes time

    def __init__(self, config, training, profiling, plan, device, rank, world_size, size):
        self.config, self.training, self.profiling, self.plan = config, training, profiling, plan
        self.device, self.rank, self.world_size = device, rank, world_size
        arguments = {"size": size, **asdict(training), **asdict(profiling)}
        self.settings = {"arguments": arguments, "model": asdict(config) | {"parameters": config.parameter_count()}}
        self.environment = describe_environment(device)
        folder = training.output_dir or (profiling.enabled and (profiling.profile_dir or "./pytorch_profiles")) or None
        self.folder = Path(folder) if folder else None
        # Traces lie in a folder of their own only where both folders were named.
        self.trace_folder = Path(profiling.profile_dir) if profiling.enabled and profiling.profile_dir else self.folder
        self.writer = None
        self.sampler = DeviceSampler(device)
        self.meter = StepMeter(device, world_size, self.prints, self.on_record)
        self.instruments: Instruments | None = None
        self.compilation: Compilation | None = None
        self._unwritten: list[StepRecord] = []
        self._flushed_at = time.monotonic()

    def open(self) -> None:
        """The folder and config.json."""
        if self.rank != 0:
            return
        if self.folder:
            for folder in dict.fromkeys((self.folder, self.trace_folder)):
                prepare_folder(folder)
            from torch.utils.tensorboard import SummaryWriter

            write_json(self.folder / "config.json", self.settings | {"environment": self.environment})
            self.writer = SummaryWriter(str(self.folder))
            for title, values in (*self.settings.items(), ("environment", self.environment)):
                self.writer.add_text(title, "    " + json.dumps(values, indent=2).replace("\n", "\n    "))

    def announce(self) -> None:
        t, c, p, plan = self.training, self.config, self.profiling, self.plan
        mode = " (Profiling Enabled)" if p.records_trace or p.enable_deepspeed_flops else ""
        mode = mode or (" (Memory Profiling)" if p.profile_memory or p.memory_snapshot else "")
        say(RULE, f"Tiny LLaMA V1 - PyTorch Baseline{mode}", RULE, "Configuration:")
        rows = {"Batch Size": t.batch_size, "Sequence Length": t.seq_len, "Number of Steps": t.num_steps}
        rows |= {"Hidden Dim": c.hidden_dim, "Num Layers": c.n_layers, "Num Heads": c.n_heads}
        rows |= {"Intermediate Dim": c.intermediate_dim, "Num KV Heads": c.n_kv_heads, "Vocab Size": c.vocab_size}
        rows |= {"Learning Rate": t.learning_rate, "Gradient Accumulation Steps": t.gradient_accumulation_steps}
        rows |= {"Attention": t.attention, "Optimizer": f"AdamW, {t.optimizer_impl or chosen_impl(self.device)}"}
        rows |= {"Compiled": t.compile, "Activation Checkpointing": t.activation_checkpointing}
        rows |= {"Precision": t.precision, "Data": t.data, "Seed": t.seed, "Deterministic": t.deterministic}
        say(*(f"  {label}: {value}" for label, value in rows.items()))
        parameters = c.parameter_count()
        say("", "Model Configuration:", f"  Total Parameters: {parameters:,}")
        say(f"  Model Size: {4 * parameters / MB:.1f} MB (FP32)")
        say(f"  Forward FLOPs per Step: {c.forward_flops(t.batch_size, t.seq_len):,} (matrix products)")
        device, cpu = self.environment["device"], self.environment["cpu"]
        say("", f"Using device: {device['type']}")
        if self.device.type == "cuda":
            say(f"GPU: {device['name']} ({device['arch']}, {device['memory_bytes'] / MB:,.0f} MB)")
        else:
            say(f"CPU: {cpu['name']} ({cpu['torch_threads']} threads, {cpu['logical_cores']} logical cores)")
        if self.world_size > 1:
            say(f"Ranks: {self.world_size}, each with {t.batch_size} samples per step")
        if plan.window:
            say(f"Profiling enabled: Steps {plan.window[0]}-{plan.window[1]}")
        say(*(f"Note: {note}" for note in plan.notes))
        if p.enabled:
            say(f"Profile data will be saved to: {self.trace_folder}/")
        say("", "Starting training...")

    def prints(self, step: int) -> bool:
        return step % self.training.log_interval == 0 or step in (1, self.training.num_steps)

    def on_record(self, record: StepRecord) -> None:
        if self.prints(record.step):
            line = f"Step {record.step}/{self.training.num_steps}: Loss = {record.loss:.4f}"
            mark = " [PROFILING]" if self.plan.left_out(record.step) == "profiled" else ""
            say(f"{line}, Time = {record.total_ms / 1e3:.3f} seconds{mark}")
        record.memory_bytes = self.sampler.memory_bytes[-1]
        self._unwritten.append(record)
        if time.monotonic() - self._flushed_at > self.FLUSH_S:
            self.write_scalars()

    def write_scalars(self) -> None:
        if self.writer is None:
            return
        try:
            self._write_scalars()
        except OSError as failure:
            raise UserError(f"cannot write events in {self.folder}: {failure.strerror}") from failure

    def _write_scalars(self) -> None:
        for record in self._unwritten:
            rate = self.training.batch_size * self.world_size / (record.total_ms / 1e3)
            scalars = {"loss": record.loss, "step_time_ms": record.total_ms, "samples_per_sec": rate}
            scalars |= {"tokens_per_sec": rate * self.training.seq_len, "memory_mb": record.memory_bytes / MB}
            scalars |= {f"phase_ms/{phase}": ms for phase, ms in record.phase_ms.items()}
            for tag, value in scalars.items():
                self.writer.add_scalar(tag, value, record.step, walltime=record.ended_at)
        self._unwritten.clear()
        self._flushed_at = time.monotonic()
        self.writer.flush()

    def close(self, error: BaseException | None) -> None:
        """After the last step, or the error that was it: the summary and the files, written or an error raised."""
        with contextlib.suppress(FloatingPointError, RuntimeError):  # the error that counts is the one at hand
            self.meter.read_finished(wait=True)
        if self.rank != 0:
            return
        status = "completed" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        ledger = self.instruments and self.instruments.memory
        memory = ledger.document() if ledger and ledger.finished else None
        summary = self.summary(status, error and explain(error)[0], memory)
        lines = self.summary_lines(summary)
        try:
            with held_signals():  # one may cut short what follows, not this
                self.write("performance_summary.json", summary)
            for name, document, text in self.explanations(summary, memory):
                self.write(name, document)
                lines += ["", *text] if text else []
            if self.folder:
                lines += ["", "Files:", *self.finish_events(summary, memory)]
        except UserError as failure:
            if error is None:
                self.write("performance_summary.json", summary | {"status": "failed", "error": str(failure)})
            raise
        finally:
            say("", *lines)

    def with_prediction(self, error: BaseException) -> BaseException:
        """Out of memory: the same error with what the prediction says beside it; others as they are."""
        if not out_of_memory(error) or not importlib.util.find_spec("analysis"):
            return error
        from analysis.prediction import NotRehearsable, memory_prediction, what_fits

        with contextlib.suppress(NotRehearsable, RuntimeError, MemoryError):  # the error at hand is the one that counts
            predicted = what_fits(memory_prediction(self.config, self.training, self.device, after_failure=True))
            return UserError(f"{explain(error)[0]}; by prediction {predicted}")
        return error

    def write(self, name: str, document: dict | None) -> None:
        if self.folder and document:
            write_json(self.folder / name, document)

    def explanations(self, summary: dict, memory: dict | None):
        """(file, its document, lines for the reader) for each profiler, by the analysis folder."""
        trace, flops = (getattr(self.instruments, part, None) for part in ("trace", "flops"))
        if memory:
            from analysis.memory import memory_lines
            from analysis.prediction import beside_measured

            memory |= beside_measured(memory, self.config, self.training, self.device)
            yield "memory_timeline.json", memory, memory_lines(memory, summary)
        if trace and trace.path:
            try:
                from analysis.profile import analyze_all, profile_lines
            except ModuleNotFoundError as missing:
                yield "operator_analysis.json", None, [f"operator_analysis.json is not written: {missing}"]
            else:
                # Rank 0 has waited for the others, so that their traces lie beside its own.
                others = trace.path.name.replace("_rank0.", "_rank*.")
                analyses, refused = analyze_all(sorted(trace.path.parent.glob(others)), summary)
                if not analyses:
                    raise refused[0]
                document = next((d for path, d in analyses if path == trace.path), analyses[0][1])
                text = profile_lines(document) if self.profiling.profile_operators else []
                yield "operator_analysis.json", document, text + [f"Not read: {error}" for error in refused]
        if flops and flops.counts and summary["performance"]["avg_step_time_ms"]:
            from analysis.flops import flops_lines, flops_profile

            profile = flops_profile(summary, flops.counts)
            yield "flops_profile.json", profile, flops_lines(profile)

    def finish_events(self, summary: dict, memory: dict | None) -> list[str]:
        """Close the event file, with figures where matplotlib is there; the names of all files of the run."""
        try:
            if memory and importlib.util.find_spec("matplotlib"):
                from analysis.memory import draw_memory_timeline

                figure = draw_memory_timeline(memory)
                figure.savefig(self.folder / "memory_timeline.png", dpi=110)
                self.writer.add_figure("memory_timeline", figure, memory["step"])
            self.write_scalars()
            self.write_hyperparameters(summary)
            self.writer.close()
        except OSError as failure:
            raise UserError(f"cannot write to {self.folder}: {failure.strerror}") from failure
        folders = dict.fromkeys((self.folder, self.trace_folder))
        return sorted(f"  {file}" for folder in folders for pattern in RUN_FILES for file in folder.glob(pattern))

    def write_hyperparameters(self, summary: dict) -> None:
        """One row of TensorBoard's HPARAMS tab, in the run's own event file."""
        from torch.utils.tensorboard.summary import hparams

        arguments = {
            k: v for k, v in asdict(self.training).items() if k not in ("num_steps", "output_dir", "log_interval")
        }
        performance = summary["performance"]
        metrics = {name: performance[name] for name in ("avg_step_time_ms", "samples_per_sec", "achieved_tflops")}
        metrics |= {"peak_memory_mb": summary["memory"]["peak_mb"], "final_loss": summary["loss"]["final"]}
        metrics = {f"hparam/{name}": value for name, value in metrics.items() if value is not None}
        for part in hparams(arguments | self.settings["model"], metrics):
            self.writer.file_writer.add_summary(part)
        for name, value in metrics.items():
            self.writer.add_scalar(name, value)

    def counted(self) -> tuple[list[StepRecord], str]:
        """The steps that averages are taken over, and what to know about them."""
        records, left_out = self.meter.records, self.plan.left_out
        if counted := [r for r in records if not left_out(r.step)]:
            reasons = collections.Counter(left_out(r.step) for r in records if left_out(r.step))
            return counted, "left out: " + ", ".join(f"{n} {reason}" for reason, n in reasons.items())
        # A trace costs a step less than a count of FLOPs or of tensors does; those count only where nothing else is.
        for kinds in (("profiled", "profiler warm-up"), ("first",)):
            if counted := [r for r in records if left_out(r.step) in kinds]:
                return counted, f"no step ran without instruments: these are {kinds[0]}, and that overhead is included"
        return records, "no step ran without instruments, so their overhead is included"

    def summary(self, status: str, error: str | None, memory: dict | None) -> dict:
        """performance_summary.json, and what print_summary() prints."""
        t, sampler, records = self.training, self.sampler, self.meter.records
        counted, note = self.counted()
        series = {"step": [r.total_ms for r in counted]}
        series |= {phase: [r.phase_ms.get(phase, 0.0) for r in counted] for phase in PHASES}
        why_none = "a spread takes two steps" if counted else "no step was completed"
        timings = {name: with_reasons(statistics(values), why_none) for name, values in series.items()}
        step = timings["step"]
        steps_per_s = 1e3 / step["mean"] if counted else math.nan
        samples, flops = t.batch_size * self.world_size, self.config.step_flops(t.batch_size, t.seq_len)
        performance = {
            "avg_step_time_ms": step["mean"],
            **{f"{name}_step_time_ms": step[name] for name in ("median", "std", "p95")},
            "first_step_time_ms": records[0].total_ms if records else None,
            "samples_per_sec": finite(samples * steps_per_s),
            "tokens_per_sec": finite(samples * t.seq_len * steps_per_s),
            **{f"avg_{phase}_time_ms": timings[phase]["mean"] for phase in PHASES},
            "model_flops_per_step": flops,
            "achieved_tflops": finite(flops * steps_per_s / 1e12),
            "gpu_utilization_percent": statistics(sampler.utilization_percent)["mean"],
            "steps_averaged": len(counted),
            "steps_averaged_note": note,
            "compilation": self.compilation and self.compilation.document(t.gradient_accumulation_steps),
            "timings_ms": timings,
        }
        if memory and self.device.type == "cpu":
            peak, average, source = memory["peak_bytes"], memory["average_bytes"], memory["source"]
        else:
            peak, average, source = sampler.peak_bytes, statistics(sampler.memory_bytes)["mean"], sampler.memory_source
        sizes = {"peak_mb": peak and peak / MB, "average_mb": average and average / MB}
        losses = [finite(r.loss) for r in records]
        ends = {"first": losses[0], "final": losses[-1]} if losses else {"first": None, "final": None}
        why = "not a finite number" if records else "no step was completed"
        done = {"num_steps": t.num_steps, "completed_steps": len(records)}
        shape = {"batch_size": t.batch_size, "sequence_length": t.seq_len, "world_size": self.world_size}
        no_utilization = sampler.utilization_reason or "the run was too short for a sample"
        not_compiled = "it did not come to that" if t.compile else "--compile is off"
        reasons = {"gpu_utilization_percent": no_utilization, "std_step_time_ms": why_none, "compilation": not_compiled}
        return {
            "status": status,
            "error": error,
            "config": self.settings,
            "environment": self.environment,
            "training": done | shape,
            "performance": with_reasons(performance, "no step was completed", **reasons),
            "memory": with_reasons(sizes, "training did not start") | {"source": source},
            "loss": with_reasons(ends, why),
            "steps": {
                "step": [r.step for r in records],
                "loss": losses,
                "time_ms": [r.total_ms for r in records],
                "left_out": [self.plan.left_out(r.step) for r in records],
            },
        }

    def summary_lines(self, summary: dict) -> list[str]:
        p, memory, done = summary["performance"], summary["memory"], summary["training"]["completed_steps"]
        lines = [RULE, "Performance Summary:"]
        if summary["status"] != "completed":
            lines += [f"Run {summary['status']} after {done} of {self.training.num_steps} steps: {summary['error']}"]
        if not done:
            return [*lines, "Nothing to average: no step was completed.", RULE]
        ends = (summary["loss"]["first"], summary["loss"]["final"])
        keys = ("mean", "median", "std", "p95")
        table = [f"{'ms':<10}" + "".join(f"{key:>10}" for key in keys)]
        for name, row in p["timings_ms"].items():
            cells = ("-" if row[key] is None else f"{row[key]:.2f}" for key in keys)
            table.append(f"{name:<10}" + "".join(f"{cell:>10}" for cell in cells))
        first, final = (format(value, ".4f") if value is not None else "none" for value in ends)
        utilization = p.get("gpu_utilization_percent_reason", p["gpu_utilization_percent"])
        return [
            *lines,
            f"Average time per step: {p['avg_step_time_ms'] / 1e3:.3f} seconds",
            f"Training speed: {p['samples_per_sec']:.1f} samples/sec",
            f"Throughput: {p['samples_per_sec']:.1f} samples/sec",
            f"Peak memory usage: {memory['peak_mb']:.0f} MB",
            *(f"Avg time per {phase}: {p[f'avg_{phase}_time_ms'] / 1e3:.3f} seconds" for phase in PHASES[1:]),
            f"\nAverages over {p['steps_averaged']} of {done} steps; {p['steps_averaged_note']}",
            *table,
            f"First step: {p['first_step_time_ms']:.2f} ms",
            *compilation_lines(p["compilation"]),
            f"Loss: {first} at the first step, {final} at the last",
            f"Tokens: {p['tokens_per_sec']:,.0f} tokens/sec",
            f"Model FLOPs per step: {p['model_flops_per_step']:,} (forward + backward matrix products)",
            f"Achieved: {p['achieved_tflops']:.4g} TFLOP/s" + (" per rank" if self.world_size > 1 else ""),
            f"Average memory usage: {memory['average_mb']:.0f} MB",
            f"Memory figures: {memory['source']}",
            f"GPU utilization: {utilization if isinstance(utilization, str) else f'{utilization:.0f}%'}",
            RULE,
        ]


def compilation_lines(compilation: dict | None) -> list[str]:
    """What compiling cost, what it brings, and when the one has paid for the other."""
    if compilation is None:
        return []
    seconds, cache = compilation["compile_s"], " from a cache of earlier ones" if compilation["from_cache"] else ""
    eager_ms, compiled_ms, steps = (compilation[n] for n in ("eager_pass_ms", "compiled_pass_ms", "steps_to_pay_off"))
    pays = f"paid off after {steps:,} steps" if steps else f"never paid off: {compilation['steps_to_pay_off_reason']}"
    return [
        f"Compile time: {seconds:.1f} seconds{cache}, before step 1 and in no average",
        f"Compiled forward and backward: {compiled_ms:.2f} ms against {eager_ms:.2f} ms, medians of "
        f"{compilation['passes']} passes; {pays}",
    ]


# ---- Command line --------------------------------------------------------------------------------------------------


def number_of(kind, minimum: int):
    """argparse type: a whole number of at least `minimum`, or a positive real one."""

    def parse(text: str):
        with contextlib.suppress(ValueError):
            if kind(text) >= minimum and (int(text) < 2**63 if kind is int else 0 < float(text) < math.inf):
                return kind(text)
        wanted = f"a whole number of at least {minimum}" if kind is int else "a positive number"
        raise argparse.ArgumentTypeError(f"{text} is not {wanted}")

    return parse


def peak_choice(text: str) -> str | float:
    """argparse type of --peak."""
    if text in ("auto", "measured"):
        return text
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1e6:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is no peak; give auto, measured or a number of TFLOP/s, as 989.4")


def memory_size(text: str) -> int:
    """argparse type: GB to bytes."""
    with contextlib.suppress(ValueError):
        if 0.001 <= float(text) <= 1e6:
            return round(float(text) * 2**30)
    raise argparse.ArgumentTypeError(f"{text} is no size of a device's memory; give GB, as 80")


class OneLineParser(argparse.ArgumentParser):
    """Errors are one line and exit code 2; a flag that nobody knows is answered with the nearest one."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

    def parse_args(self, args=None, namespace=None):
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            nearest = difflib.get_close_matches(unknown[0].split("=")[0], self._option_string_actions, n=1)
            self.error(
                f"unknown argument {unknown[0]}; " + (f"did you mean {nearest[0]}?" if nearest else "see --help")
            )
        return parsed


def build_parser() -> OneLineParser:
    """All flags, from the dataclasses; each defaults to None here, to tell what the user gave."""
    parser = OneLineParser(
        prog="tiny_llama_v1.py",
        allow_abbrev=False,
        description="Train Tiny LLaMA and say where time and memory went.",
        epilog="Defaults in parentheses. The README has the problem sizes, and what a run leaves in its folder.",
    )
    group = parser.add_argument_group("shortcuts")
    group.add_argument(
        "--size", metavar="NAME", choices=[*SIZES, *SIZE_ALIASES], help=f"{', '.join(SIZES)}; flags beside it win"
    )
    switches = {
        "--use-amp": "the same as --precision bf16",
        "--enable-all-profiling": "every profiler below",
        "--validate-setup": "report versions, devices and what is missing, and train three steps",
        "--dry-run": "predict memory by category, what would fit and the least time of a step; train nothing",
    }
    for name, text in switches.items():
        group.add_argument(name, action="store_true", default=None, help=text)
    text = "with --dry-run: predict for a GPU of so many GB of 2^30 bytes (this device)"
    group.add_argument("--device-memory", type=memory_size, metavar="GB", help=text)
    kinds = typing.get_type_hints
    for title, config in (("model", TinyLlamaConfig), ("training", TrainingConfig), ("profiling", ProfilerConfig)):
        group = parser.add_argument_group(title)
        for f in (f for f in fields(config) if f.metadata):
            options, kind = dict(f.metadata), kinds(config)[f.name]
            shown, text, minimum = options.pop("shown", f.default), options.pop("help"), options.pop("minimum", 1)
            names = ["--" + f.name.replace("_", "-"), *([options.pop("alias")] if "alias" in options else [])]
            if kind is bool:
                options["action"] = "store_true"
            elif kind in (int, float):
                options |= {
                    "type": number_of(kind, minimum if kind is int else 0),
                    "metavar": "N" if kind is int else "X",
                }
            text += f" ({shown})" if shown not in (None, False) else ""
            group.add_argument(*names, default=None, help=text, **options)
    return parser


def resolve(args: argparse.Namespace) -> tuple[TinyLlamaConfig, TrainingConfig, ProfilerConfig]:
    """Flags to configurations: what was given, else the row of --size, else the defaults.  Checks that they fit."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    values = (SIZES[SIZE_ALIASES.get(args.size, args.size)] if args.size else {}) | given
    if not args.size and "n_heads" in given:
        values.setdefault("n_kv_heads", args.n_heads // 2 if args.n_heads % 2 == 0 else args.n_heads)
    if not args.size and "hidden_dim" in given:
        values.setdefault("intermediate_dim", 2 * args.hidden_dim)
    if args.use_amp:
        values.setdefault("precision", "bf16")
    if args.enable_all_profiling:
        switches = "enable_pytorch_profiler profile_stacks profile_operators profile_memory enable_deepspeed_flops"
        values = dict.fromkeys(switches.split(), True) | values
    config, training, profiling = (
        kind(**{f.name: values[f.name] for f in fields(kind) if f.name in values})
        for kind in (TinyLlamaConfig, TrainingConfig, ProfilerConfig)
    )
    config = replace(config, max_seq_len=training.seq_len)
    hidden, heads, kv_heads = config.hidden_dim, config.n_heads, config.n_kv_heads
    batch, micro_steps, precision = training.batch_size, training.gradient_accumulation_steps, training.precision
    for wrong, message in (
        (hidden % heads != 0, f"--hidden-dim {hidden}: not divisible by --n-heads {heads}; give a multiple of it"),
        (
            config.head_dim % 2 == 1,
            f"--hidden-dim {hidden}: its {heads} heads are {config.head_dim} wide, and rotary embedding turns pairs; "
            f"give a multiple of {2 * heads}",
        ),
        (heads % kv_heads != 0, f"--n-kv-heads {kv_heads}: does not divide --n-heads {heads}; give a divisor of it"),
        (
            batch % micro_steps != 0,
            f"--gradient-accumulation-steps {micro_steps}: does not divide --batch-size {batch}; give a divisor of it",
        ),
        ("" in (training.output_dir, profiling.profile_dir), "--output-dir and --profile-dir: name a folder"),
        (
            bool(args.device_memory and not args.dry_run),
            "--device-memory: says something to --dry-run alone; give both",
        ),
        (
            bool(args.use_amp) and precision != "bf16",
            f"--use-amp: means bf16, but --precision is {precision}; give one",
        ),
        (
            profiling.system_profiler and profiling.records_trace,
            "--system-profiler: nsys and rocprofv3 take the place of torch.profiler, and two cannot listen to one GPU; "
            "leave out --enable-pytorch-profiler, --profile-stacks and --profile-operators",
        ),
        (
            training.compile and profiling.profile_memory,
            "--profile-memory: counts tensors operator by operator, and --compile leaves no operators to watch; "
            "give one (--dry-run --compile predicts the memory)",
        ),
    ):
        if wrong:
            raise UserError(message, exit_code=2)
    return config, training, profiling


def validate_setup(config, training: TrainingConfig, profiling: ProfilerConfig, size: str | None) -> None:
    """What is installed, what is missing and what for, which device; then three steps."""
    hip, cuda = torch.version.hip, torch.version.cuda
    say(RULE, "Setup", RULE, f"{'Python':<20}{platform.python_version()}")
    for package, purpose in PACKAGES.items():
        say(f"{package:<20}{version_of(package) or f'missing, needed for {purpose}: pip install {package}'}")
    say(f"{'PyTorch build':<20}{f'ROCm {hip}' if hip else f'CUDA {cuda}' if cuda else 'CPU only'}")
    say(f"{'GPUs visible':<20}{torch.cuda.device_count()}", "")
    run(config, replace(training, num_steps=3), profiling, size)
    say("", "Setup is valid: three steps were trained.")


def dry_run(config, training: TrainingConfig, profiling: ProfilerConfig, device_memory: int | None) -> None:
    """prediction.json and its lines, instead of a run."""
    require("--dry-run", ["analysis"])
    device = choose_device(training.device)
    check_precision(training.precision, device)
    if not is_first_rank():
        return
    from analysis.prediction import prediction, prediction_lines

    document = prediction(config, training, device, profiling.peak, device_memory)
    lines = prediction_lines(document)
    if folder := training.output_dir or profiling.profile_dir:
        prepare_folder(Path(folder))
        write_json(Path(folder) / "prediction.json", document)
        lines += ["", "Files:", f"  {Path(folder) / 'prediction.json'}"]
    say(*lines)


def raise_interrupted(signum: int, frame) -> None:
    _interrupted_by.append(signum)
    raise Interrupted(signum)


@contextlib.contextmanager
def held_signals():
    """Signals that come meanwhile are raised at the end."""
    before = len(_interrupted_by)
    signums = (signal.SIGINT, signal.SIGTERM)
    handlers = {s: signal.signal(s, lambda signum, frame: _interrupted_by.append(signum)) for s in signums}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    if len(_interrupted_by) > before:
        raise Interrupted(_interrupted_by[-1])


def run_from_arguments(args: argparse.Namespace) -> None:
    config, training, profiling = resolve(args)
    if args.dry_run:
        dry_run(config, training, profiling, args.device_memory)
        return
    (validate_setup if args.validate_setup else run)(config, training, profiling, args.size)


def exit_code_of(work) -> int:
    """Call work() and turn how it ends into an exit code: the one place where an error becomes a line."""
    handlers = {signum: signal.signal(signum, raise_interrupted) for signum in (signal.SIGINT, signal.SIGTERM)}
    _interrupted_by.clear()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # folders may have names that no encoding knows
    try:
        work()
        return 0
    except (Exception, Interrupted) as error:  # noqa: BLE001
        line, exit_code = explain(error)
        if os.environ.get("TINY_LLAMA_DEBUG") == "1":
            traceback.print_exc()
        rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
        print(f"{Path(sys.argv[0]).name}: error: {rank}{' '.join(line.split())}", file=sys.stderr, flush=True)
        return exit_code
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def main(argv: list[str] | None = None) -> int:
    return exit_code_of(lambda: run_from_arguments(build_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.modules["tiny_llama_v1"] = sys.modules["__main__"]  # what the analysis imports is this very module
    sys.exit(main())
