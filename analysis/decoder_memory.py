"""What a LLaMA decoder keeps for its backward pass, in closed form; fake-tensor runs must agree with the formula."""

from __future__ import annotations

from harness.devices import PRECISIONS


def kept_by_formula(config, training) -> dict[str, tuple[int, int]]:
    """Bytes that the forward pass of a micro-batch keeps for the backward one, by component over all layers: the part
    that is linear in the tokens (and what does not grow with them), and the part that is quadratic in its length.

    Under autocast the copies of weights and inputs in the narrow type are kept too.  With checkpointing the blocks keep
    only their output.
    """
    batch_size = training.batch_size // training.gradient_accumulation_steps
    tokens, size = batch_size * training.seq_len, PRECISIONS[training.precision].itemsize
    low = size < 4
    d, f, kv, heads = config.hidden_dim, config.intermediate_dim, config.kv_dim, config.n_heads
    wide, square = tokens * d, batch_size * heads * training.seq_len**2
    norm = 4 * (wide + tokens + (0 if low else wide))
    copies = low * size  # bytes for each element of a weight or input that is copied to the narrow type
    # Keys and values are copied for the heads that share them, and where a matmul cannot read them transposed.  Of a
    # single sample it can read them as they are, if each head has its own or all have the same.  A fused kernel
    # also reads those of more samples in place.
    eager = training.attention == "eager"
    values_stay = config.n_kv_heads in (1, heads) and (batch_size == 1 or not eager)
    keys_stay = values_stay and not low
    layer = {
        "attention_norm": (norm, 0),
        "attention.q_proj": (copies * (d * d + wide), 0),
        "attention.k_proj": (copies * (d * kv + wide), 0),
        "attention.v_proj": (copies * (d * kv + wide) + values_stay * size * tokens * kv, 0),
        "attention.rope": (keys_stay * size * tokens * kv + (not (eager or low)) * size * wide, 0),
        "attention.scores": (eager * size * wide * (2 - keys_stay), 0),
        "attention.softmax": (0, eager * 4 * square),
        "attention.weighted_sum": (eager * (1 - values_stay) * size * wide, eager * copies * square),
        # Inputs of the fused kernel that are not kept already, its output, and the logsumexp of each row.
        "attention.sdpa": (
            (not eager) * (size * wide * (1 + low + (not keys_stay) + (not values_stay)) + 4 * tokens * heads),
            0,
        ),
        "attention.o_proj": (copies * d * d + eager * size * wide, 0),
        "attention_residual": (4 * wide, 0),
        "mlp_norm": (norm, 0),
        "mlp.gate_proj": (copies * (d * f + wide) + size * tokens * f, 0),
        "mlp.up_proj": (copies * (d * f + wide) + size * tokens * f, 0),
        "mlp.activation": (2 * size * tokens * f, 0),
        "mlp.down_proj": (copies * d * f, 0),
    }
    if training.activation_checkpointing:
        layer = {}
    kept = {name: tuple(config.n_layers * part for part in parts) for name, parts in layer.items()}
    kept["mlp_residual"] = (config.n_layers * 4 * wide, 0)
    kept["embedding"], kept["norm"] = (4 * wide, 0), (norm, 0)
    kept["lm_head"] = (copies * (config.vocab_size * d + wide), 0)
    kept["loss"] = (4 * (tokens * config.vocab_size + 2), 0)
    return {name: parts for name, parts in kept.items() if any(parts)}
