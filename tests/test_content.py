"""Everything that the workshop's source documents teach has a place here.

The documents are not part of this repository.  Each row names one of their sections in our words,
the section of ours that covers it, and a word or phrase that has to be there.  If a section moves,
its row moves with it.
"""

import re

import pytest
from helpers import PROJECT
from test_texts import headings, outside_of_blocks

START, PAPER, REFERENCE, ONE, TWO, THREE = (
    f"exercises/{name}.md"
    for name in (
        "README",
        "model_on_paper",
        "reference",
        "exercise_1_baseline_analysis",
        "exercise_2_memory_analysis",
        "exercise_3_bottleneck_identification",
    )
)
FOUR, FIVE, SIX, SEVEN, EIGHT = (
    f"exercises/exercise_{name}.md"
    for name in (
        "4_comparative_analysis",
        "5_training_benchmark",
        "6_attention",
        "7_mixed_precision",
        "8_compilation",
    )
)
TEN, TEN_ANSWERS, ELEVEN, ELEVEN_ANSWERS = (
    f"exercises/{name}.md"
    for name in (
        "exercise_10_data_parallel",
        "answers/exercise_10",
        "exercise_11_sharding",
        "answers/exercise_11",
    )
)
TROUBLE, OWN = "docs/troubleshooting.md", "docs/your_own_model.md"

# The long walkthrough: section, where it is covered, a phrase.
WALKTHROUGH = [
    (
        "note: numbers differ by machine",
        f"{REFERENCE}#results-by-machine",
        "another machine are not a target",
    ),
    ("letters", f"{PAPER}#notation", "key/value heads"),
    ("units, growth", f"{REFERENCE}#units", "O(S^2)"),
    ("contents", "README.md#i-want-to-learn", "1. Baseline analysis"),
    ("1.1 training and inference", f"{PAPER}#training-and-inference", "KV cache"),
    ("1.1 why profile", f"{START}#start-here", "Why profile at all?"),
    ("1.2 goals", f"{START}#start-here", "Afterwards you will be able to"),
    ("1.3 samples per second", f"{REFERENCE}#what-is-measured", "B / mean step time"),
    ("1.3 FLOP/s", f"{REFERENCE}#what-is-measured", "achieved rate"),
    ("1.3 MFU", f"{REFERENCE}#what-is-measured", "peak rate of this device"),
    ("1.3 memory", f"{REFERENCE}#what-is-measured", "peak memory"),
    ("1.3 GPU utilization", f"{REFERENCE}#what-is-measured", "GPU utilization is something else"),
    ("1.4 ROCm", f"{START}#check-your-environment", "rocminfo"),
    ("1.4 GPU, groups", f"{START}#check-your-environment", "video,render"),
    ("1.4 PyTorch", f"{START}#check-your-environment", "torch.cuda.is_available()"),
    ("1.4 another PyTorch", f"{TROUBLE}#the-wrong-build-of-pytorch", "pip uninstall torch"),
    ("1.4 DeepSpeed", f"{START}#check-your-environment", "DeepSpeed"),
    ("1.4 files", "CONTRIBUTING.md#the-folders", "tiny_llama_v1.py"),
    ("1.4 first run", f"{START}#check-your-environment", "--num-steps 5"),
    ("2.1 configuration", f"{PAPER}#notation", "--n-kv-heads"),
    ("2.1 parameters", f"{PAPER}#parameters", "2,873,600"),
    ("2.1 parameters of a layer", f"{PAPER}#parameters", "590,336"),
    ("2.1 training memory", f"{PAPER}#memory", "for AdamW's two moments"),
    ("2.2 drawing of a layer", f"{PAPER}#the-model", "attention_residual"),
    ("2.3 listing of attention", f"{PAPER}#attention", "q = self.q_proj(x)"),
    ("2.3 why attention is so", f"{PAPER}#attention", "Three projections"),
    ("2.3 FLOPs of attention", f"{PAPER}#flops", "attention.scores"),
    ("2.4 listing of SwiGLU", f"{PAPER}#swiglu", "F.silu(gate) * up"),
    ("2.4 why SwiGLU", f"{PAPER}#swiglu", "Why a gate"),
    ("2.4 FLOPs of the feed-forward part", f"{PAPER}#flops", "mlp.down_proj"),
    ("2.5 listing of RMSNorm", f"{PAPER}#rmsnorm", "torch.rsqrt"),
    ("2.5 why not LayerNorm", f"{PAPER}#rmsnorm", "Why not LayerNorm"),
    ("2.6 FLOPs of a layer, shares", f"{PAPER}#flops", "*sum of mlp*"),
    ("2.7 memory by part", f"{PAPER}#memory", "quadratic, MB"),
    (
        "2.7 which part is limited by what",
        f"{PAPER}#what-limits-each-part",
        "Always limited by memory",
    ),
    ("3.1 structure of the script", f"{REFERENCE}#how-the-script-is-built", "InstrumentSchedule"),
    ("3.2 flags", f"{REFERENCE}#all-flags", "--flops-profile-step"),
    ("3.3 profiler in a script", f"{OWN}#a-whole-script", "with profile("),
    ("3.3 named ranges", f"{OWN}#a-whole-script", "record_function(name)"),
    ("3.3 FLOPs in a script", f"{OWN}#a-whole-script", "FlopsProfiler(model)"),
    ("3.4 launches by part", f"{PAPER}#what-limits-each-part", "attention.rope"),
    ("3.4 launches of a step", f"{PAPER}#operators-per-layer", "kernels per step"),
    ("3.5 baseline", "README.md#two-commands-to-start-with", "./run_baseline.sh"),
    ("3.5 profiler", "README.md#two-commands-to-start-with", "./run_pytorch_profiler.sh"),
    (
        "3.5 FLOPs",
        "docs/flops_and_limits.md#how-close-is-a-step-to-the-limit-of-the-device",
        "./run_deepspeed_flops.sh",
    ),
    ("4.1 objective", f"{ONE}#exercise-1-baseline-analysis", "Objective"),
    ("4.2 baseline, first step", f"{ONE}#step-1-a-run-without-a-profiler", "one-time costs"),
    (
        "4.2 profiler, overhead, files",
        f"{ONE}#step-2-the-same-run-with-the-profiler",
        "operator_analysis.json",
    ),
    ("4.2 memory of the profiler", f"{ONE}#more-of-the-output", "Memory of the profiler"),
    ("4.2 TensorBoard", f"{ONE}#step-3-tensorboard", "6006"),
    ("4.2 without TensorBoard", f"{ONE}#step-4-the-same-answers-without-tensorboard", "json.tool"),
    ("4.2 patterns", f"{ONE}#step-5-patterns", "Matrix multiplications or everything else"),
    (
        "4.3 results and files",
        "exercises/answers/exercise_1.md#answers-to-exercise-1-baseline-analysis",
        "exercise_1.json",
    ),
    ("4.4 out of memory, files, ports", f"{ONE}#troubleshooting", "--port 6007"),
    ("4.4 ports in use", f"{TROUBLE}#tensorboard-and-the-profiler", "ss -ltn"),
    (
        "4.4 watching the GPU",
        f"{TROUBLE}#the-gpu-is-idle-or-slower-than-expected",
        "watch -n 1 rocm-smi",
    ),
    (
        "4.4 unsteady times",
        f"{TROUBLE}#the-gpu-is-idle-or-slower-than-expected",
        "vary between runs",
    ),
    ("4.5 questions", f"{ONE}#extra-questions", "being fused"),
    ("4.6 takeaways, next steps", f"{ONE}#key-takeaways", "What next"),
    ("5.1 objective", f"{TWO}#exercise-2-memory-analysis", "Objective"),
    (
        "5.2 why memory matters",
        f"{TWO}#exercise-2-memory-analysis",
        "Memory decides what can be trained",
    ),
    ("5.3 batch sizes", f"{TWO}#step-4-watch-it-grow", "up to a batch of 16"),
    ("5.3 timeline", f"{TWO}#step-2-measure", "memory_timeline.png"),
    ("5.3 sequence lengths", f"{TWO}#step-4-watch-it-grow", "512 tokens"),
    ("5.3 longest sequence", f"{TWO}#step-4-watch-it-grow", "Longest sequence"),
    ("5.3 largest tensors", f"{TWO}#step-2-measure", "largest_tensors"),
    ("5.3 peak over average", f"{TWO}#step-2-measure", "peak / average"),
    ("5.3 bandwidth", f"{TWO}#step-5-bytes-moved", "ridge point"),
    ("5.4 scaling", f"{TWO}#step-4-watch-it-grow", "constant + linear B S + quadratic B S^2"),
    ("5.4 signs of each limit", f"{PAPER}#the-signs-of-each", "GPU utilization"),
    ("5.5 ranking, with fusion", f"{TWO}#step-3-what-would-reduce-it", "fusing operators"),
    (
        "5.6 results",
        "exercises/answers/exercise_2.md#answers-to-exercise-2-memory-analysis",
        "exercise_2.json",
    ),
    ("5.7 out of memory", f"{TWO}#troubleshooting", "out of memory"),
    ("5.7 allocator", f"{TROUBLE}#memory-runs-out-although-it-should-fit", "max_split_size_mb"),
    ("5.8 questions", f"{TWO}#questions", "fragmentation"),
    ("5.9 takeaways", f"{TWO}#key-takeaways", "Between linear and quadratic"),
    ("6.1 objective", f"{THREE}#exercise-3-bottleneck-identification", "Objective"),
    ("6.2 sizes", "docs/commands.md#sizes", "very_large"),
    (
        "6.2 expected time by size",
        f"{THREE}#step-5-sizes-that-do-not-run-here",
        "peak rate of the datasheet",
    ),
    ("6.3 running sizes", f"{THREE}#step-1-sizes", "./launch_performance_study.sh tiny"),
    ("6.3 comparing sizes", f"{THREE}#step-4-side-by-side", "Throughput:"),
    ("6.4 scaling patterns", f"{THREE}#step-4-side-by-side", "grows with"),
    ("6.4 memory by size", f"{THREE}#step-5-sizes-that-do-not-run-here", "--device-memory 80"),
    (
        "6.5 results",
        "exercises/answers/exercise_3.md#answers-to-exercise-3-bottleneck-identification",
        "exercise_3.json",
    ),
    ("6.6 components across sizes", f"{THREE}#step-4-side-by-side", "exercise3_components"),
    ("6.7 troubleshooting", f"{THREE}#troubleshooting", "Permission denied"),
    (
        "6.8 recommended batch, largest model, best size",
        f"{THREE}#extra-questions",
        "Which batch would you choose",
    ),
    ("6.8 utilization by size", f"{THREE}#extra-questions", "GPU utilization change"),
    ("6.9 takeaways, what to do next", f"{THREE}#key-takeaways", "What next"),
]
# The short walkthrough and the two exercises on pages of their own.
PAGES = [
    ("prerequisites, environment", f"{START}#check-your-environment", "rocm-smi"),
    ("the model's defaults", f"{PAPER}#notation", "D_ff"),
    (
        "opportunities: fused QKV, SwiGLU, attention, precision",
        "docs/optimizations.md#which-flags-make-a-step-faster-or-smaller",
        "sdpa",
    ),
    ("opportunities: projections as one matmul", f"{PAPER}#attention", "one matmul"),
    ("links", f"{REFERENCE}#further-reading", "flops-profiler"),
    ("first exercise: record a baseline", f"{ONE}#extra-worksheet", "loss after the last step"),
    (
        "first exercise: kinds of kernels",
        f"{ONE}#step-2-the-same-run-with-the-profiler",
        "different kernels",
    ),
    ("first exercise: transfers", f"{ONE}#step-5-patterns", "Memcpy"),
    ("first exercise: memory layout", f"{ONE}#extra-questions", "memory layout"),
    ("first exercise: utilization", f"{ONE}#more-of-the-output", "GPU utilization"),
    (
        "first exercise: what limits, what to fuse, MFU, memory",
        f"{ONE}#extra-questions",
        "the MFU alone",
    ),
    ("first exercise: done when", f"{ONE}#done-when", "spread"),
    ("second exercise: memory by batch", f"{TWO}#step-4-watch-it-grow", "average_bytes"),
    ("second exercise: memory per token", f"{TWO}#step-4-watch-it-grow", "per token"),
    (
        "second exercise: bandwidth from the file",
        f"{TWO}#step-5-bytes-moved",
        "memory_bandwidth_used_gb_per_sec",
    ),
    (
        "second exercise: utilization of the bandwidth",
        f"{TWO}#extra-questions",
        "Utilization of the memory bandwidth",
    ),
    ("second exercise: thresholds", f"{TWO}#step-5-bytes-moved", "below 10 FLOPs/byte"),
    ("second exercise: bottleneck", f"{TWO}#extra-worksheet", "ridge point of this device"),
    ("second exercise: done when", f"{TWO}#done-when", "ranked"),
]
# The answers to a benchmarking course.
COURSE = [
    ("times by size", f"{FIVE}#step-1-the-parts-of-a-step-across-sizes", "standard deviation"),
    ("warm-up", f"{FIVE}#step-2-effect-of-warm-up", "sqrt(n)"),
    (
        "forward pass in a system profiler",
        f"{FIVE}#step-5-the-forward-pass-seen-from-outside",
        "nsys",
    ),
    ("data types under autocast", f"{SEVEN}#step-1-which-tensor-has-which-dtype", "ToyModel"),
    ("norms in 16 bits", f"{SEVEN}#step-3-range-and-precision", "65,504"),
    ("a step in bf16 that was slower", f"{SEVEN}#extra-questions", "many times slower"),
    ("memory over a step", f"{FIVE}#extra-questions", "recognize the backward"),
    (
        "peak by sequence length",
        f"{FIVE}#step-3-peak-memory-by-sequence-length",
        "--memory-snapshot",
    ),
    ("memory in 16 bits", f"{SEVEN}#step-5-what-it-saves", "never halved"),
    (
        "size of the residual stream",
        f"{FIVE}#step-4-does-a-large-model-fit-in-24-gb",
        "residual stream",
    ),
    ("largest allocations", f"{FIVE}#extra-questions", "largest activation"),
    ("a model that does not fit", f"{FIVE}#step-4-does-a-large-model-fit-in-24-gb", "4 x 4 P"),
    ("attention by length", f"{SIX}#step-1-three-ways-to-compute-the-same-thing", "--seq-lens"),
    (
        "head dimensions 16 to 128",
        f"{SIX}#step-3-a-configuration-that-runs-out-of-memory",
        "--d-heads 16 32 64 128",
    ),
    ("an outlier in a table", f"{SIX}#extra-questions", "256 tokens uses more memory"),
    (
        "accounting for out of memory",
        "exercises/answers/exercise_6.md#answers-to-exercise-6-attention",
        "2^33",
    ),
    ("memory of the backward pass", f"{SIX}#questions", "grow with S^2"),
    (
        "fused attention",
        "exercises/answers/exercise_6.md#answers-to-exercise-6-attention",
        "running maximum",
    ),
    ("compiled attention", f"{EIGHT}#step-1-attention", "compiled"),
    ("compiled training", f"{EIGHT}#step-2-a-training-step", "break-even"),
    ("why small models gain little or much", f"{EIGHT}#questions", "small model's forward pass"),
]
# The part of that course for several GPUs, question by question.
SEVERAL_GPUS = [
    (
        "all-reduce by size",
        f"{TEN}#step-1-the-network-alone",
        "each size four times the one before",
    ),
    ("all-reduce by number of processes", f"{TEN}#questions", "with the number of ranks"),
    (
        "backends",
        f"{TEN_ANSWERS}#answers-to-exercise-10-data-parallel-training",
        "gloo copies through host memory",
    ),
    (
        "naive data parallel training",
        f"{TEN}#step-2-four-ways-to-reduce-gradients",
        "an all-reduce for each parameter",
    ),
    ("its step, and the share of communication", f"{TEN}#worksheet", "step, naive"),
    (
        "one flat all-reduce",
        f"{TEN}#step-2-four-ways-to-reduce-gradients",
        "copied into a flat tensor",
    ),
    ("flat and naive compared", f"{TEN}#questions", "Flat and naive send the same bytes"),
    (
        "overlap, parameter by parameter or in buckets",
        f"{TEN}#worksheet",
        "bytes begun in the backward pass",
    ),
    (
        "traces with and without overlap",
        f"{TEN}#extra-questions",
        "one with overlap and one without",
    ),
    (
        "bucket sizes of 1 to 1000 MB",
        f"{TEN}#step-4-on-paper-the-best-size-of-a-bucket",
        "--bucket-mbs 1 10 100 1000",
    ),
    (
        "overhead by number of buckets",
        f"{TEN}#step-4-on-paper-the-best-size-of-a-bucket",
        "n alpha + s / (n beta)",
    ),
    (
        "best size of a bucket",
        f"{TEN}#step-4-on-paper-the-best-size-of-a-bucket",
        "sqrt(s alpha beta)",
    ),
    (
        "where that model fails",
        f"{TEN_ANSWERS}#answers-to-exercise-10-data-parallel-training",
        "fails in every",
    ),
    (
        "memory with a sharded optimizer, three moments",
        f"{ELEVEN}#questions",
        "after the model is built",
    ),
    ("the same by category", f"{ELEVEN}#worksheet", "optimizer state at the peak"),
    ("time with a sharded optimizer", f"{ELEVEN}#worksheet", "zero1: step"),
    (
        "how it differs from ZeRO stage 1",
        f"{ELEVEN}#questions",
        "The paper by which ZeRO-1 is known",
    ),
    (
        "memory of the largest model on one device",
        f"{ELEVEN}#step-1-on-paper-what-a-rank-keeps",
        "8 P of optimizer",
    ),
    (
        "memory by number of ranks, and the fewest",
        f"{ELEVEN}#extra-worksheet",
        "fewest ranks that fit",
    ),
    (
        "batch at which the step is bound by arithmetic",
        f"{ELEVEN}#extra-worksheet",
        "tokens on a rank for which both are",
    ),
    (
        "whether the gathers finish in time",
        f"{ELEVEN}#step-4-how-many-gpus-does-the-largest-model-need",
        "1.5 F / beta",
    ),
    ("most ranks for a global batch", f"{ELEVEN}#extra-questions", "global batch of 2,048 samples"),
    (
        "a smaller batch at the same speed",
        f"{ELEVEN_ANSWERS}#answers-to-exercise-11-sharding",
        "Tensor parallelism",
    ),
    (
        "resharding, prefetching",
        f"{ELEVEN}#step-3-gather-twice-or-keep",
        "gathers it again for the backward",
    ),
]
# What ours adds to all of them, and must not lose either.
EVERY_EXERCISE = ("Worksheet", "Questions", "Troubleshooting", "Key takeaways", "Done when")


def plain(text: str) -> str:
    """On one line, without markup."""
    return " ".join(re.sub(r"[*`]", "", text).split())


def section(text: str, anchor: str) -> str:
    """The text below a heading, down to the next one of its level or above."""
    lines, fenced = [], False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        heading = None if fenced else re.match(r"#+(?= )", line)
        lines.append((line, len(heading[0]) if heading else 99))
    start = next(
        i for i, (line, level) in enumerate(lines) if level < 99 and anchor in headings(line)
    )
    end = next(
        (i for i in range(start + 1, len(lines)) if lines[i][1] <= lines[start][1]), len(lines)
    )
    return "\n".join(line for line, _ in lines[start:end])


@pytest.mark.parametrize("row", WALKTHROUGH + PAGES + COURSE + SEVERAL_GPUS, ids=lambda row: row[0])
def test_a_section_of_the_documents_has_its_place(row):
    _, target, phrase = row
    path, anchor = target.split("#")
    text = (PROJECT / path).read_text()
    assert anchor in headings(text), f"{path} has no section {anchor}"
    assert plain(phrase) in plain(section(text, anchor)), f"{target} no longer mentions {phrase!r}"


@pytest.mark.parametrize(
    "path",
    [
        ONE,
        TWO,
        THREE,
        FOUR,
        FIVE,
        SIX,
        SEVEN,
        EIGHT,
        "exercises/exercise_9_measuring_well.md",
        TEN,
        ELEVEN,
    ],
)
def test_an_exercise_has_all_its_sections(path):
    titles = re.findall(r"^## (.+)$", outside_of_blocks((PROJECT / path).read_text()), re.M)
    assert [title for title in titles if title in EVERY_EXERCISE] == list(EVERY_EXERCISE)
