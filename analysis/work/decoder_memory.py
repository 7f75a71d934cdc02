"""What a LLaMA decoder keeps for its backward pass, in closed form; fake-tensor runs must agree with the formula."""

from __future__ import annotations

import math

from harness.machine.devices import PRECISIONS
from harness.model.chunked_loss import chunk_size


def kept_by_formula(config, training, on_gpu: bool = False) -> dict[str, tuple[int, int]]:
    """Bytes that the forward pass of a micro-batch keeps for the backward one, by component over all layers: the part
    that is linear in the tokens (and what does not grow with them), and the part that is quadratic in its length.

    Under autocast the copies of weights and inputs in the narrow type are kept too.  With checkpointing the blocks keep
    only their output.  on_gpu: with the fused kernels of a GPU, where a CPU has other ones.
    """
    batch_size = training.batch_size // training.gradient_accumulation_steps
    tokens, size = batch_size * training.seq_len, PRECISIONS[training.precision].itemsize
    low = size < 4
    d, f, kv, heads = config.hidden_dim, config.intermediate_dim, config.kv_dim, config.n_heads
    wide, square = tokens * d, batch_size * heads * training.seq_len**2
    triton = training.kernels == "triton"
    # The normalized rows, unless a kernel computes them again, one number per row, and the output as a matmul's input.
    # Our kernel writes it in the narrow type; the others in float32, and each matmul keeps a copy.
    recomputed = triton or (training.fused_norm and on_gpu)
    norm = 4 * ((not recomputed) * wide + tokens) + (size * wide if triton or not low else 0)
    copies = low * size  # bytes for each element of a weight or input that is copied to the narrow type
    copied_wide = (not triton) * copies * wide  # of the output of a norm
    # Eager attention copies keys and values for the heads that share them, and where a matmul cannot read them
    # transposed.  Of a single sample it can read them as they are, if each head has its own or all have the same.
    # Fused kernels read them in place, but for those of GPUs in float32, which need a copy for each head.
    eager, alike = training.attention == "eager", config.n_kv_heads in (1, heads)
    values_stay = alike and batch_size == 1 if eager else alike or low or not on_gpu
    keys_stay = values_stay and not low
    copied = 0 if values_stay else size * wide  # keys, and values
    qkv = {
        "attention.q_proj": (copies * d * d + copied_wide, 0),
        "attention.k_proj": (copies * d * kv + copied_wide, 0),
        "attention.v_proj": (copies * d * kv + copied_wide + values_stay * size * tokens * kv, 0),
    }
    gate_up = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (copies * d * f + copied_wide + size * tokens * f, 0))
    if training.fused_projections:  # one copy of the input; values are views of a tensor that has queries and keys too
        merged = d + 2 * kv
        qkv = {"attention.qkv_proj": (copies * d * merged + copied_wide + values_stay * size * tokens * merged, 0)}
        gate_up = {"mlp.gate_up_proj": (copies * 2 * d * f + copied_wide + 2 * size * tokens * f, 0)}
    layer = {
        "attention_norm": (norm, 0),
        **qkv,
        "attention.rope": (keys_stay * size * tokens * kv + (not (eager or low)) * size * wide, 0),
        "attention.scores": (eager * size * wide * (2 - keys_stay), 0),
        "attention.softmax": (0, eager * 4 * square),
        "attention.weighted_sum": (eager * copied, eager * copies * square),
        # The kernel's output, the logsumexp of each row, and what it reads that is not kept already: queries and keys
        # in the narrow type, or copies for each head.
        "attention.sdpa": (
            (not eager) * (size * wide + 4 * tokens * heads + copies * tokens * (d + kv) + 2 * copied),
            0,
        ),
        "attention.o_proj": (copies * d * d + eager * size * wide, 0),
        "attention_residual": (4 * wide, 0),
        "mlp_norm": (norm, 0),
        **gate_up,
        "mlp.activation": ((1 if triton else 2) * size * tokens * f, 0),
        "mlp.down_proj": (copies * d * f, 0),
    }
    if training.activation_checkpointing:
        layer = {}
    kept = {name: tuple(config.n_layers * part for part in parts) for name, parts in layer.items()}
    kept["mlp_residual"] = (config.n_layers * 4 * wide, 0)
    kept["embedding"], kept["norm"] = (4 * wide, 0), (norm, 0)
    kept["lm_head"] = (copies * config.vocab_size * d + copied_wide, 0)
    kept["loss"] = (4 * (tokens * config.vocab_size + 2), 0)
    if training.fused_loss:  # the input, and of each chunk one number per token
        chunks = math.ceil(config.vocab_size / chunk_size(config.vocab_size, d))
        kept["norm"] = (norm + (low and not triton) * 4 * wide, 0)
        kept["lm_head"], kept["loss"] = (0, 0), (4 * (tokens * (chunks + 1) + 1), 0)
    return {name: parts for name, parts in kept.items() if any(parts)}
