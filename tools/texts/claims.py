"""What public texts about such a model claim, and what is true: with figures of this code."""

from __future__ import annotations

from typing import NamedTuple

from analysis.hardware.matching import rows_named
from analysis.memory.predicted import predicted_memory
from harness.base.units import MB
from tools.texts.numbers import DEFAULT, MULTI_HEAD, layer_parameters, one_more_layer, table


class Claim(NamedTuple):
    claim: str
    truth: str
    command: str  # in Markdown


def amd_workshop() -> str:
    """Claims about the default model, from texts of the kind of AMD's TinyLLaMA workshop."""
    config, memory = DEFAULT.config, predicted_memory(DEFAULT, on_gpu=False).document()
    parameters = config.parameter_count()
    ours, full = (w.formulas.forward_flops_by_component() for w in (DEFAULT, MULTI_HEAD))
    total, head = sum(ours.values()), ours["lm_head"]
    without_head = sum(full.values()) - head
    kept = DEFAULT.formulas.kept_for_backward().values()
    linear, quadratic = map(sum, zip(*kept, strict=True))  # bytes
    tokens = DEFAULT.training.seq_len
    operators = one_more_layer("phase")
    (gcd,) = rows_named("MI250X")
    rows = [
        Claim(
            "2,345,984 parameters",
            f"{parameters:,}: embedding and head {config.vocab_size * config.hidden_dim:,} each,"
            f" layers {layer_parameters(config):,} each, last norm {config.hidden_dim}",
            "`python3 tiny_llama_v1.py --dry-run`, line `Work`",
        ),
        Claim(
            "the tiny model's peak memory is 2,847 MB",
            f"Predicted for a CPU, its tensors take {memory['peak_bytes'] / MB:.0f} MB at the peak,"
            " and the parts that the same text lists add up to 63.5 MB. Where the other figure"
            " comes from is not told",
            "`python3 tiny_llama_v1.py --dry-run`, `./run_baseline.sh`, lines `Peak memory`",
        ),
        Claim(
            "Adam's states take 36.8 MB",
            "Two moments of four bytes for each parameter:"
            f" {memory['peak']['bytes_by_category']['optimizer'] / MB:.1f} MB. 36.8 is four times"
            " that text's 9.2 MB of weights, and should be twice, 18.4 MB for its count",
            "`python3 tiny_llama_v1.py --dry-run`, line `made of`",
        ),
        Claim(
            "about 17 kernels in the forward pass of a layer",
            f"The host calls {operators['forward']} operators there, and each launches a kernel"
            " or several",
            "[operators per layer](../exercises/model_on_paper.md#operators-per-layer);"
            " `./run_pytorch_profiler.sh --verbose` on a GPU",
        ),
        Claim(
            "an MI250X reaches 95 TFLOP/s in fp32 and 190 in fp16",
            "The first is the matrix rate of a whole card, the second that of one of its two GCDs."
            f" PyTorch sees each GCD as a device: {gcd.fp32:g} and {gcd.fp16:g}",
            "`python3 tiny_llama_v1.py --dry-run --target-device MI250X`",
        ),
        Claim(
            "5.91 GFLOPs in a forward pass",
            f"{total / 1e9:.3f}. Counting K and V at full width adds"
            f" {(sum(full.values()) - total) / 1e9:.3f}, forgetting the head takes away"
            f" {head / 1e9:.3f}: the two errors cancel, and {without_head / 1e9:.3f} looks like"
            " agreement",
            "[FLOPs](../exercises/model_on_paper.md#flops); `./run_deepspeed_flops.sh`",
        ),
        Claim(
            "the profiler's FLOPs grow with every step",
            "A step takes the same number each time. A counter that is not reset between steps"
            " adds them up",
            "`./run_deepspeed_flops.sh`: three counts of one step, beside each other",
        ),
        Claim(
            "versions 3 and 4 are about three times as fast",
            "Their norm is a kernel without a backward pass. What lies before the last norm gets"
            " no gradient: the backward pass is nearly empty, and only the head trains",
            "the line `Audit` of every run;"
            " [exercise 12](../exercises/exercise_12_audit.md), on changes of that kind",
        ),
        Claim(
            "memory grows with the square of the sequence length",
            f"At {tokens} tokens {quadratic / (linear + quadratic):.0%} of what is kept for the"
            " backward pass does; the rest grows linearly. The two are equal at"
            f" {tokens * linear / quadratic:,.0f} tokens, and a fused kernel of attention keeps"
            " nothing that is quadratic",
            "`./run_study.sh memory`; [memory](../exercises/model_on_paper.md#memory)",
        ),
    ]
    return claim_table(rows)


SCORES = 8 * 16384**2 * 4  # bytes of a [8, 16384, 16384] matrix in fp32
OUTLIER = 8_654_422_016  # bytes, as published for batch 8, width 32, 256 tokens


def cs336() -> str:
    """Claims of answers to CS336's second assignment that are public."""
    rows = [
        Claim(
            "attention with batch 8, width 32 and 256 tokens takes 8.06 GB: an outlier",
            "Probably the scores of the row before, which ran out of memory at 16,384 tokens:"
            f" 8 x 16,384 x 16,384 x 4 bytes are {SCORES / MB / 1024:.2f} GB, and"
            f" {(OUTLIER - SCORES) / MB:.1f} MB remain. A row that fails can leave its tensors"
            " behind, unless each row has a process of its own",
            "`./run_study.sh attention`: each row is a process",
        ),
        Claim(
            "bf16 is twelve times as slow as fp32 on the large model",
            "Possibly the system, WSL, moved pages to the host and back in each step because the"
            " card's memory was exceeded; arithmetic alone does not explain a factor of twelve on a"
            " card that has bf16. What either takes can be predicted before it runs",
            "`python3 tiny_llama_v1.py --size gpt2-large --dry-run --precision bf16"
            " --device-memory GB`",
        ),
        Claim(
            "compiled, attention becomes a FlashAttention kernel",
            "Only where it matches a pattern that the compiler knows. Else softmax and mask are"
            " fused with what is beside them, and the matrix of scores is still written."
            " `scaled_dot_product_attention` does not need the compiler for that",
            "`./run_study.sh attention --implementations eager compiled sdpa`, the columns of"
            " memory",
        ),
        Claim(
            "a spike at the end of a training step that nobody could name",
            "The optimizer. Its first step makes two moments for each parameter, which stay, and"
            " PyTorch's own AdamW on a GPU makes temporary lists of all of them in each step",
            "`python3 analyze_trace.py SNAPSHOT`, lines `At the peak` and `Largest lines`;"
            " [who held it](memory.md#who-held-it-snapshots)",
        ),
    ]
    return claim_table(rows)


def claim_table(claims: list[Claim]) -> str:
    return table(["claim", "what is true, and why", "what shows it"], claims, left=3)
