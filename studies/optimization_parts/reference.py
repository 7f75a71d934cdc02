"""transformers' LLaMA as a workload: the same shape,
weights, data, loss, optimizer and loop as ours."""

import importlib.util
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.base.command_line import compiler_problem, version_of
from harness.model.workload import TrainingState
from tiny_llama_v1 import TinyLlamaConfig, TinyLlamaModel, TinyLlamaWorkload, build

MISSING = "No reference: transformers is not installed (python3 -m pip install transformers)"
NAMES = {  # part of a name in transformers: ours
    "model.": "",
    "embed_tokens": "embedding",
    "self_attn": "attention",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}


def our_name(theirs: str) -> str:
    for old, new in NAMES.items():
        theirs = theirs.replace(old, new)
    return theirs


def reference_model(
    config: TinyLlamaConfig, model: TinyLlamaModel, attention: str = "eager"
) -> nn.Module:
    """LlamaForCausalLM of the same shape, with the same weights.  attention: eager or sdpa."""
    from transformers import LlamaConfig, LlamaForCausalLM

    llama_config = LlamaConfig(
        hidden_size=config.hidden_dim,
        intermediate_size=config.intermediate_dim,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        vocab_size=config.vocab_size,
        num_hidden_layers=config.n_layers,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        use_cache=False,
        tie_word_embeddings=False,
        attn_implementation=attention,
    )
    reference = LlamaForCausalLM(llama_config)
    ours = model.state_dict()
    reference.load_state_dict({theirs: ours[our_name(theirs)] for theirs in reference.state_dict()})
    return reference


class Reference(nn.Module):
    """Called as ours is: input_ids [B, S], labels [B, S] -> (None, loss)."""

    def __init__(self, llama: nn.Module):
        super().__init__()
        self.llama = llama

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[None, Tensor]:
        logits = self.llama(input_ids=input_ids).logits  # [B, S, V]
        return None, F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.reshape(-1))


@dataclass(frozen=True)
class ReferenceWorkload(TinyLlamaWorkload):
    """The same training of transformers' LLaMA."""

    def build(self, device: torch.device, place=None) -> TrainingState:
        """place is not used: the model is not sharded."""

        def theirs(ours: TinyLlamaModel) -> nn.Module:
            model = Reference(reference_model(self.config, ours, self.training.attention))
            if device.type == "cpu":  # fake tensors cannot be moved
                return model
            return model.to(device)

        return build(self.config, self.training, device, theirs)


def reference_of(baseline: TinyLlamaWorkload, on_gpu: bool) -> ReferenceWorkload | None:
    """With its own best settings: SDPA, a fused optimizer, compiled if this machine can.  None
    without transformers."""
    if importlib.util.find_spec("transformers") is None:
        return None
    compiled = compiler_problem(on_gpu) is None
    training = replace(
        baseline.training, attention="sdpa", optimizer_impl="fused", compile=compiled
    )
    return ReferenceWorkload(baseline.config, training, baseline.size)


def reference_title(workload: ReferenceWorkload) -> str:
    compiled = ", compiled" if workload.compiled else ""
    return (
        f"transformers {version_of('transformers')} LlamaForCausalLM: sdpa, fused AdamW{compiled}"
    )
