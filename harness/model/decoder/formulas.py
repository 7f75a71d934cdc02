"""What is known of a LLaMA decoder's training step without running it."""

import math
from dataclasses import dataclass
from typing import Any

from harness.base.text import arithmetic
from harness.machine.devices import PRECISIONS
from harness.model.checkpointing import checkpointed_layers
from harness.model.decoder.memory import KeptBytes, KeptTensors
from harness.model.precision import parameter_dtype
from harness.model.workload import StepFormulas

MATMULS = [  # of parameters in a block, in the order in which they run
    *(f"attention.{part}_proj" for part in ("qkv", "q", "k", "v", "o")),
    *(f"mlp.{part}_proj" for part in ("gate_up", "gate", "up", "down")),
]


@dataclass(frozen=True)
class DecoderFormulas(StepFormulas):
    """config and training have the fields of the script's TinyLlamaConfig and TrainingConfig."""

    config: Any
    training: Any

    def forward_flops_by_component(self) -> dict[str, int]:
        batch_size, seq_len = self.training.batch_size, self.training.seq_len
        return self.config.forward_flops_by_component(batch_size, seq_len, self.training)

    def forward_flops_per_layer(self) -> dict[str, int]:
        flops = self.forward_flops_by_component()
        del flops["lm_head"]
        return {part: count // self.config.n_layers for part, count in flops.items()}

    def least_forward_flops(self) -> int:
        """A fused kernel may skip the masked scores: all above the diagonal."""
        parts, seq_len = self.forward_flops_by_component(), self.training.seq_len
        return sum(parts.values()) - parts.get("attention.sdpa", 0) * (seq_len - 1) // (2 * seq_len)

    def recomputed_flops(self) -> int:
        """Fused attention recomputes the scores, the fused loss the logits.  Checkpointing
        recomputes every matmul of each block except the last, down_proj, because no operator needs
        its output in the backward pass; per operator, every second one, and eager attention."""
        config, training = self.config, self.training
        flops = self.forward_flops_by_component()
        recomputed = 0
        if training.attention == "sdpa":
            scores = 2 * training.batch_size * training.seq_len**2 * config.hidden_dim
            recomputed += scores * config.n_layers
        if training.fused_loss:
            recomputed += flops["lm_head"]
        kept = {"mlp.down_proj", "lm_head"}
        if training.activation_checkpointing == "op":
            matmuls = [part for part in MATMULS if part in flops]
            kept.update(matmuls[::2])
            kept.add("attention.sdpa")
        again = sum(count for part, count in flops.items() if part not in kept)
        layers = checkpointed_layers(training.activation_checkpointing, config.n_layers)
        return recomputed + again // config.n_layers * layers

    def first_loss(self) -> tuple[float, float]:
        """ln V of a uniform guess, and s^2 / 2 for logits of standard deviation s.  The mean over
        tokens varies with s; ten are assumed to be independent, because frequent ones repeat."""
        uniform = math.log(self.config.vocab_size)
        s = self.config.init_std * self.config.hidden_dim**0.5
        tokens = self.training.batch_size * self.training.seq_len
        return uniform + s**2 / 2, 0.02 * uniform + 4 * s / min(10, tokens) ** 0.5

    def kept_for_backward(self, on_gpu: bool = False) -> dict[str, KeptBytes] | None:
        by_operator = self.training.activation_checkpointing == "op"
        if by_operator or arithmetic(vars(self.training)) != self.training.precision:
            return None  # a fake-tensor run tells
        return KeptTensors(self.config, self.training, on_gpu).by_component()

    def least_memory_bytes(self) -> int:
        """Weight, gradient and two Adam moments, the mask, and the attention weights that are saved
        in every layer; of those that are checkpointed, in one at a time."""
        config, training = self.config, self.training
        quadratic = 0  # bytes per element of the S x S mask and scores
        if training.attention == "eager":
            again = checkpointed_layers(training.activation_checkpointing, config.n_layers)
            layers = config.n_layers - again + (1 if again else 0)
            samples = layers * config.n_heads * training.batch_size
            scores = samples // training.gradient_accumulation_steps
            quadratic = 2 + PRECISIONS[arithmetic(vars(training))].itemsize * scores
        itemsize = parameter_dtype(training.precision).itemsize
        return 4 * itemsize * config.parameter_count() + quadratic * training.seq_len**2
