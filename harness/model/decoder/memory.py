"""What a LLaMA decoder keeps for its backward pass, in closed form; fake-tensor runs must agree
with the formula."""

import math
from typing import Any, NamedTuple

import torch

from harness.machine.devices import PRECISIONS, shares_heads
from harness.model.checkpointing import checkpointed_layers
from harness.model.chunked_loss import chunk_size


class KeptBytes(NamedTuple):
    """What a component keeps: the part that is linear in the tokens, with what does not grow with
    them, and the part that is quadratic in the length of a sequence."""

    linear: int = 0
    quadratic: int = 0


class KeptTensors:
    """Bytes that the forward pass of a micro-batch keeps for the backward one, component by
    component.

    Outside of matmuls tensors are float32.  Under autocast a matmul also keeps copies of its weight
    and of its input in the narrow type.  config and training have the fields of TinyLlamaConfig and
    TrainingConfig.  on_gpu: with the fused kernels of a GPU, where a CPU has other ones.
    """

    def __init__(self, config: Any, training: Any, on_gpu: bool):
        self.config, self.training, self.on_gpu = config, training, on_gpu
        self.batch_size = training.batch_size // training.gradient_accumulation_steps
        self.tokens = self.batch_size * training.seq_len
        self.itemsize = PRECISIONS[training.precision].itemsize  # of what matmuls read and write
        self.autocast = self.itemsize < 4
        self.triton = training.kernels == "triton"
        # Bytes of the tensors between matmuls.
        self.float32_hidden = 4 * self.tokens * config.hidden_dim  # [B, S, D]
        self.hidden = self.itemsize * self.tokens * config.hidden_dim  # [B, S, D] or [B, H, S, E]
        self.keys = self.values = self.itemsize * self.tokens * config.kv_dim  # [B, K, S, E]
        self.feed_forward = self.itemsize * self.tokens * config.intermediate_dim  # [B, S, D_ff]
        # Elements of [B, H, S, S].
        self.scores = self.batch_size * config.n_heads * training.seq_len**2

    # ---- Parts that several components have ------------------------------------------------------

    def weight_copy(self, inputs: int, outputs: int) -> int:
        return self.itemsize * inputs * outputs if self.autocast else 0

    def normalized_copy(self) -> int:
        """Bytes of the copy of a norm's output that a matmul reads: our kernel writes the narrow
        type, all others write float32."""
        return self.hidden if self.autocast and not self.triton else 0

    def norm(self) -> int:
        """The normalized rows, unless a kernel computes them again, one number per row, and the
        output as it is read by matmuls, unless they have copies."""
        recomputed = self.triton or (self.training.fused_norm and self.on_gpu)
        rows = 0 if recomputed else self.float32_hidden
        output = 0 if self.normalized_copy() else self.hidden
        return rows + 4 * self.tokens + output

    # ---- A layer ---------------------------------------------------------------------------------

    def layer(self) -> dict[str, KeptBytes]:
        if self.training.attention == "eager":
            attention = self.eager_attention()
        else:
            attention = self.fused_attention()
        return {
            "attention_norm": KeptBytes(self.norm()),
            **self.projections(),
            **attention,
            "attention_residual": KeptBytes(self.float32_hidden),
            "mlp_norm": KeptBytes(self.norm()),
            **self.mlp(),
        }

    def reads_values_in_place(self) -> bool:
        """Whether attention needs no copy of keys or values for each query head.

        Eager attention copies them for the heads that share them, and where a matmul cannot read
        them transposed: of a single sample it can, if each head has its own or all have the same.
        Fused kernels read them in place, but for those that devices.shares_heads() leaves out.
        """
        alike = self.config.n_kv_heads in (1, self.config.n_heads)
        if self.training.attention == "eager":
            return alike and self.batch_size == 1
        return alike or self.shares_heads()

    def shares_heads(self) -> bool:
        dtype = torch.bfloat16 if self.autocast else torch.float32
        return shares_heads("cuda" if self.on_gpu else "cpu", dtype)

    def reads_keys_in_place(self) -> bool:
        """Rotated keys are float32, so under autocast there is a copy in any case."""
        return self.reads_values_in_place() and not self.autocast

    def projections(self) -> dict[str, KeptBytes]:
        """Queries, keys and values; values are kept here where attention reads them in place."""
        hidden, kv = self.config.hidden_dim, self.config.kv_dim
        kept_values = self.values if self.reads_values_in_place() else 0
        copied_input = self.normalized_copy()
        if self.training.fused_projections:
            # One copy of the input; values are views of a tensor of all three.
            width = hidden + 2 * kv
            merged = self.itemsize * self.tokens * width if kept_values else 0
            kept = self.weight_copy(hidden, width) + copied_input + merged
            return {"attention.qkv_proj": KeptBytes(kept)}
        queries = self.weight_copy(hidden, hidden) + copied_input
        keys = self.weight_copy(hidden, kv) + copied_input
        return {
            "attention.q_proj": KeptBytes(queries),
            "attention.k_proj": KeptBytes(keys),
            "attention.v_proj": KeptBytes(keys + kept_values),
        }

    def eager_attention(self) -> dict[str, KeptBytes]:
        hidden_dim = self.config.hidden_dim
        scaled_queries = attention_output = self.hidden
        copied_keys = 0 if self.reads_keys_in_place() else self.hidden  # a copy for each query head
        copied_values = 0 if self.reads_values_in_place() else self.hidden
        narrow_weights = self.itemsize * self.scores if self.autocast else 0
        output = self.weight_copy(hidden_dim, hidden_dim) + attention_output
        return {
            "attention.rope": KeptBytes(self.keys if self.reads_keys_in_place() else 0),
            "attention.scores": KeptBytes(scaled_queries + copied_keys),
            "attention.softmax": KeptBytes(0, 4 * self.scores),
            "attention.weighted_sum": KeptBytes(copied_values, narrow_weights),
            "attention.o_proj": KeptBytes(output),
        }

    def fused_attention(self) -> dict[str, KeptBytes]:
        """The kernel keeps its output and the logsumexp of each row, and what it reads that is not
        kept already: queries and keys in the narrow type, or copies of keys and values for each
        head."""
        hidden_dim = self.config.hidden_dim
        rotated_queries = 0 if self.autocast else self.hidden
        rotated_keys = self.keys if self.reads_keys_in_place() else 0
        output, logsumexp = self.hidden, 4 * self.tokens * self.config.n_heads
        # Keys are cast after they were copied for the heads, values were cast before.
        narrow_keys = self.keys if self.shares_heads() else self.hidden
        narrow_copies = self.hidden + narrow_keys if self.autocast else 0
        copied = 1 if self.autocast else 2  # values, and keys that were not cast
        copies_for_heads = 0 if self.reads_values_in_place() else copied * self.hidden
        return {
            "attention.rope": KeptBytes(rotated_keys + rotated_queries),
            "attention.sdpa": KeptBytes(output + logsumexp + narrow_copies + copies_for_heads),
            "attention.o_proj": KeptBytes(self.weight_copy(hidden_dim, hidden_dim)),
        }

    def mlp(self) -> dict[str, KeptBytes]:
        hidden, intermediate = self.config.hidden_dim, self.config.intermediate_dim
        copied_input = self.normalized_copy()
        if self.training.fused_projections:  # one copy of the input
            kept = self.weight_copy(hidden, 2 * intermediate) + copied_input
            gate_up = {"mlp.gate_up_proj": KeptBytes(kept + 2 * self.feed_forward)}
        else:
            kept = self.weight_copy(hidden, intermediate) + copied_input + self.feed_forward
            gate_up = {"mlp.gate_proj": KeptBytes(kept), "mlp.up_proj": KeptBytes(kept)}
        # silu(gate), unless our kernel computes it again, and its product with up.
        activation = self.feed_forward if self.triton else 2 * self.feed_forward
        return {
            **gate_up,
            "mlp.activation": KeptBytes(activation),
            "mlp.down_proj": KeptBytes(self.weight_copy(intermediate, hidden)),
        }

    # ---- The whole model -------------------------------------------------------------------------

    def head(self) -> dict[str, KeptBytes]:
        """The last norm, the matmul that makes logits, and the loss."""
        vocab_size, hidden_dim = self.config.vocab_size, self.config.hidden_dim
        if not self.training.fused_loss:
            logits = self.weight_copy(hidden_dim, vocab_size) + self.normalized_copy()
            return {
                "norm": KeptBytes(self.norm()),
                "lm_head": KeptBytes(logits),
                "loss": KeptBytes(4 * (self.tokens * vocab_size + 2)),
            }
        float32_input = self.float32_hidden if self.normalized_copy() else 0
        chunks = math.ceil(vocab_size / chunk_size(vocab_size, hidden_dim))
        return {
            "norm": KeptBytes(self.norm() + float32_input),
            # Of each chunk one number per token.
            "loss": KeptBytes(4 * (self.tokens * (chunks + 1) + 1)),
        }

    def by_component(self) -> dict[str, KeptBytes]:
        """Over all layers, without components that keep nothing."""
        n_layers = self.config.n_layers
        checkpointed = checkpointed_layers(self.training.activation_checkpointing, n_layers)
        whole = n_layers - checkpointed  # of the others only their output is kept
        kept = {}
        for name, of_layer in self.layer().items():
            kept[name] = KeptBytes(whole * of_layer.linear, whole * of_layer.quadratic)
        kept["mlp_residual"] = KeptBytes(n_layers * self.float32_hidden)
        kept["embedding"] = KeptBytes(self.float32_hidden)
        kept.update(self.head())
        return {name: sizes for name, sizes in kept.items() if any(sizes)}
