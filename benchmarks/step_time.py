#!/usr/bin/env python3
"""How long does our training step take beside the reference LLaMA's, and the script's loop beside a bare one?

    python3 benchmarks/step_time.py [--sizes tiny small] [--rounds N] [--device cpu] [--output FILE]

Two comparisons, each interleaved in this one process (A B, B A, A B, ...), so that a machine that changes its speed
changes it for both:

    reference   a training step of TinyLlamaModel against transformers' LlamaForCausalLM with eager attention: the
                same shape, weights, data, loss and optimizer
    loop        tiny_llama_v1.train() with everything a plain run does (timing, printing, scalars kept for
                TensorBoard) against the same step written as a bare loop

The figure is the ratio of the medians; the interval is its 95% bootstrap interval over rounds.  The ratio of the
fastest rounds stands beside it: on a machine that others use too, it is what they disturb least.
"""

import argparse
import contextlib
import io
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tiny_llama_v1 as tiny_llama

NAMES = {  # transformers' names of the parts, and ours
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


def reference_model(config: tiny_llama.TinyLlamaConfig, model: tiny_llama.TinyLlamaModel):
    """LlamaForCausalLM of the same shape, with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_dim,
            intermediate_size=config.intermediate_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="eager",
        )
    )
    ours = model.state_dict()
    reference.load_state_dict({theirs: ours[our_name(theirs)] for theirs in reference.state_dict()})
    return reference


def seconds(work, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def compare(a, b, rounds: int, device: torch.device) -> dict:
    """Times of a() and b(), a step each, in turn, after two rounds that do not count."""
    times = np.zeros((2, rounds))
    for i in tqdm(range(-2, rounds), leave=False, disable=None):
        for j in (0, 1) if i % 2 == 0 else (1, 0):
            elapsed = 1e3 * seconds((a, b)[j], device)
            if i >= 0:
                times[j, i] = elapsed
    picks = np.random.default_rng(0).integers(0, rounds, (2000, rounds))
    ratios = np.median(times[0][picks], axis=1) / np.median(times[1][picks], axis=1)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return {
        "a_median_ms": float(np.median(times[0])),
        "b_median_ms": float(np.median(times[1])),
        "ratio": float(np.median(times[0]) / np.median(times[1])),
        "ratio_of_minima": float(times[0].min() / times[1].min()),
        "ratio_95_low": float(low),
        "ratio_95_high": float(high),
        "rounds": rounds,
        "a_ms": times[0].round(3).tolist(),
        "b_ms": times[1].round(3).tolist(),
    }


def stepper(forward, parameters, stream):
    """One bare training step: no timing, no ranges, no reports."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def step() -> float:
        input_ids, labels = next(stream)
        loss = forward(input_ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def against_reference(config, training, device, rounds: int) -> dict:
    model = tiny_llama.TinyLlamaModel(config)
    reference = reference_model(config, model).to(device)
    model = model.to(device)
    corpus = tiny_llama.synthetic_corpus(config.vocab_size, training)

    def reference_loss(input_ids, labels):
        logits = reference(input_ids=input_ids).logits
        return F.cross_entropy(logits.float().view(-1, config.vocab_size), labels.view(-1))

    ours = stepper(lambda i, t: model(i, t)[1], model.parameters(), tiny_llama.batches(corpus, training, device))
    theirs = stepper(reference_loss, reference.parameters(), tiny_llama.batches(corpus, training, device))
    difference = abs(ours() - theirs())
    if difference > 1e-4:
        raise SystemExit(f"the models differ: first losses are {difference:.2e} apart")
    return compare(ours, theirs, rounds, device) | {"first_loss_difference": difference}


def against_bare_loop(config, training, device, rounds: int) -> dict:
    training = replace(training, num_steps=1)  # one step a call, so that the two alternate as closely as they can
    profiling = tiny_llama.ProfilerConfig()
    corpus = tiny_llama.synthetic_corpus(config.vocab_size, training)
    model = tiny_llama.TinyLlamaModel(config).to(device)
    bare = stepper(lambda i, t: model(i, t)[1], model.parameters(), tiny_llama.batches(corpus, training, device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler, autocast = torch.amp.GradScaler(device.type, enabled=False), torch.autocast(device.type, enabled=False)
    plan = tiny_llama.Plan(training.num_steps, profiling)
    report = tiny_llama.Report(config, training, profiling, plan, device, 0, 1, None)
    instruments = tiny_llama.Instruments(plan, profiling, model, optimizer, device, report, "")
    stream = tiny_llama.batches(corpus, training, device)

    def script_loop() -> None:
        with contextlib.redirect_stdout(io.StringIO()), instruments.run():
            tiny_llama.train(model, optimizer, scaler, autocast, stream, training, report.meter, instruments)

    with report.sampler:
        return compare(script_loop, bare, rounds, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(tiny_llama.SIZES), default=["tiny", "small"])
    parser.add_argument("--rounds", type=int, default=100, help="for the first size; larger ones get a quarter (100)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--output", type=Path, help="JSON file for the results and every single time")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = tiny_llama.choose_device(args.device)
    environment = tiny_llama.describe_environment(device)
    environment["packages"]["transformers"] = tiny_llama.version_of("transformers")
    print(f"{environment['device']['name']}, torch {torch.__version__}, {torch.get_num_threads()} threads, fp32")
    columns = f"{'ours ms':>10}{'other ms':>10}{'ratio':>8}{'95% interval':>18}{'of minima':>11}{'rounds':>8}"
    print(f"{'size':<8}{'comparison':<12}{columns}")
    rows = []
    for i, size in enumerate(args.sizes):
        flags = tiny_llama.build_parser().parse_args(["--size", size])
        config, training, _ = tiny_llama.resolve(flags)
        rounds = args.rounds if i == 0 else max(4, args.rounds // 4)
        for name, comparison in (("reference", against_reference), ("loop", against_bare_loop)):
            row = {"size": size, "comparison": name, **comparison(config, training, device, rounds)}
            rows.append(row)
            interval = f"{row['ratio_95_low']:.3f} to {row['ratio_95_high']:.3f}"
            print(
                f"{size:<8}{name:<12}{row['a_median_ms']:>10.2f}{row['b_median_ms']:>10.2f}{row['ratio']:>8.3f}"
                f"{interval:>18}{row['ratio_of_minima']:>11.3f}{rounds:>8}",
                flush=True,
            )
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        tiny_llama.write_json(args.output, {"environment": environment, "rows": rows})
        print(f"Results: {args.output}")


if __name__ == "__main__":
    sys.exit(tiny_llama.exit_code_of(main))
