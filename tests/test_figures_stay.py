"""No figure moves: what the commands count, predict, measure and read from a trace stays what it
was, to the digit.

`golden/` holds recorded figures: losses of deterministic runs, parameters and FLOPs, predicted and
measured bytes, the bytes that a step moves, the predictions of the sweeps, and what is read from
two fixed traces.  Each test runs a command in this process and compares the JSON documents that it
writes with them.  No time of this machine is recorded.

Numbers must be equal; `tolerance()` has the exceptions.  Losses depend on the CPU and on the
version of PyTorch, which are stored beside them: on another machine they may differ by one part in
ten thousand.  Bytes and calls of operators may change with PyTorch too, so a failure says which
version recorded them.

When a figure is meant to change, or for another version of PyTorch, record anew from the working
tree and read the difference in git:

    python tests/test_figures_stay.py --record                 all of golden/
    python tests/test_figures_stay.py --record losses memory   some files of it

When a field of a document is renamed, change the line below that reads it; when a name that is data
is renamed (a component, a class of operators), add it to RENAMED.  The two traces in golden/ are
input and are never recorded anew: one is of two training steps on a CPU, the other was made from
such a trace by inventing kernels, copies, collectives.
"""

import argparse
import contextlib
import importlib
import io
import json
import math
import platform
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from warm_python import PIXEL

PROJECT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).resolve().parent / "golden"

# Names that are data in the documents: as recorded -> as written today.
RENAMED: dict[str, str] = {
    "matrix product": "matmul",
    "normalisation": "normalization",
    "synchronisation": "synchronization",
}

# Measures the peaks of this machine, which takes seconds and enters no figure compared here.
PEAK_MEASUREMENT = "analysis.hardware.cache.measured"
# Draws what memory was held when.
PICTURE = "analysis.report.figures.pictures.picture"

# All of its dimensions differ, and so do samples and tokens, lest a formula be right by accident.
SMALL_MODEL = "--vocab-size 100 --hidden-dim 32 --n-layers 3 --n-heads 4 --intermediate-dim 80"
SMALL = f"{SMALL_MODEL} --seq-len 24 --batch-size 12"
VARIANTS = {
    "fp32": "",
    "bf16": "--precision bf16",
    "sdpa": "--attention sdpa",
    "checkpointing": "--activation-checkpointing",
    "accumulation": "--gradient-accumulation-steps 4",
    "accumulation 2": "--gradient-accumulation-steps 2",
    "bf16 sdpa checkpointing": "--precision bf16 --attention sdpa --activation-checkpointing",
    "foreach optimizer": "--optimizer-impl foreach",
    "fused optimizer": "--optimizer-impl fused",
}
COUNTED_VARIANTS = ("fp32", "accumulation", "bf16 sdpa checkpointing")


def run(program: str, flags: str, folder: Path) -> None:
    """Run a command in this process, on the CPU, one thread; its files go to the folder."""
    module = importlib.import_module(program.removesuffix(".py"))
    command = [program, *shlex.split(flags), "--output-dir", str(folder)]
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    try:
        with (
            mock.patch.object(sys, "argv", command),
            mock.patch(PEAK_MEASUREMENT, return_value=None),
            mock.patch(PICTURE, return_value=PIXEL),
        ):
            exit_code = module.main()
    except SystemExit as stop:
        exit_code = stop.code
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    assert not exit_code, f"{' '.join(command)}: exit code {exit_code}"


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def by_name(rows: list[dict], name: str, *fields: str) -> dict:
    """Rows of a document by the field that names them; several fields as a dictionary, a single one
    as it is."""
    table = {
        row[name]: {field: row[field] for field in fields} if fields[1:] else row[fields[0]]
        for row in rows
    }
    assert len(table) == len(rows), f"two rows have the same {name}"
    return table


# ---- The figures: each function runs one command and returns what is compared --------------------


def prediction(flags: str, folder: Path) -> dict:
    """A dry run for a GPU of 80 GB and 1 GB of reserve: these figures do not depend on the
    machine."""
    run("tiny_llama_v1.py", f"--dry-run --device cpu --device-memory 81 {flags}", folder)
    document = read(folder / "prediction.json")
    return {
        "parameters": document["parameters"],
        "forward_flops": document["forward_flops"],
        "step_flops": document["step_flops"],
        "peak_memory_mb": document["peak_memory_mb"],
        "memory_by_category_mb": document["memory_by_category_mb"],
        "largest_tensors_bytes": [tensor["bytes"] for tensor in document["largest_tensors"]],
        "kept_for_backward": by_name(
            document["kept_for_backward"], "component", "mb", "quadratic_mb"
        ),
        "fits": document["fits"],
        "max_batch_size": document["max_batch_size"],
        "max_seq_len": document["max_seq_len"],
        "minimum_bytes_moved": document["step_time_bounds"]["least_bytes"],
    }


def losses(flags: str, folder: Path) -> dict:
    """Deterministic steps, at a learning rate that makes the last loss depend on every part of the
    model."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "numbers.txt"
    text.write_text(" ".join(map(str, range(1000))))
    flags = flags.replace("TEXT", shlex.quote(str(text)))
    run("tiny_llama_v1.py", f"--device cpu --deterministic --seed 42 {flags}", folder)
    document = read(folder / "performance_summary.json")
    return {
        "first": document["loss"]["first"],
        "final": document["loss"]["final"],
        "steps": document["steps"]["loss"],
    }


def memory(flags: str, folder: Path) -> dict:
    """The tensors of the second of three steps, counted, and what was predicted for them."""
    run("tiny_llama_v1.py", f"--device cpu --num-steps 3 --profile-memory {flags}", folder)
    summary, document = (
        read(folder / "performance_summary.json"),
        read(folder / "memory_timeline.json"),
    )
    peak, largest, predicted = document["peak"], document["largest_tensor"], document["predicted"]
    return {
        "peak_mb": summary["memory"]["peak_mb"],
        "peak_bytes": document["peak_bytes"],
        "peak_phase": peak["phase"],
        "peak_where": peak["where"],
        "peak_bytes_by_category": peak["bytes_by_category"],
        "largest_tensors_at_peak_bytes": [tensor["bytes"] for tensor in peak["largest_tensors"]],
        "allocations": document["allocations"],
        "largest_tensor": {
            name: largest[name]
            for name in ("bytes", "dtype", "shape", "where", "phase", "category")
        },
        "phases": [
            {"phase": row["name"], "peak_bytes": row["peak_bytes"]} for row in document["phases"]
        ],
        "predicted_peak_bytes": predicted["peak_bytes"],
        "predicted_bytes_by_category": predicted["bytes_by_category"],
        "kept_for_backward": by_name(
            predicted["kept_for_backward"], "component", "bytes", "formula_bytes", "quadratic_bytes"
        ),
    }


def flops(flags: str, folder: Path) -> dict:
    """FLOPs of a step by formula and by both counters; the bytes that it moves."""
    run(
        "run_deepspeed_flops.py",
        f"--device cpu --num-steps 3 --computational-intensity {flags}",
        folder,
    )
    profile, traffic = (
        read(folder / "flops_profile.json"),
        read(folder / "computational_intensity.json"),
    )
    analysis = profile["flops_analysis"]
    counts, deepspeed = analysis["reconciliation"], analysis["deepspeed"] or {}
    return {
        "parameters": analysis["parameters"],
        "forward_flops": analysis["forward_flops"],
        "step_flops": analysis["step_flops"],
        "recomputed_flops": analysis["recomputed_flops"],
        "flops_per_parameter": analysis["flops_per_parameter"],
        "flops_per_token": analysis["flops_per_token"],
        "by_component": by_name(
            analysis["by_component"],
            "component",
            "forward_flops",
            "backward_flops",
            "forward_flops_per_layer",
            "share",
        ),
        "by_counter": by_name(
            counts["rows"], "counter", "forward_flops", "backward_flops", "beyond_matmuls"
        ),
        "by_module": counts["forward_flops_by_module"],
        "deepspeed_macs_by_module": deepspeed.get("macs_by_module"),
        "traffic": {
            "step_flops": traffic["step_flops"],
            "step_bytes": traffic["step_bytes"],
            "minimum_step_bytes": traffic["minimum_step_bytes"],
            "arithmetic_intensity_flops_per_byte": traffic["arithmetic_intensity_flops_per_byte"],
            "intensity_at_minimum_flops_per_byte": traffic["intensity_at_minimum_flops_per_byte"],
            "classes": by_name(
                traffic["classes"], "class", "calls", "flops", "element_operations", "bytes"
            ),
            "phases": by_name(traffic["phases"], "phase", "flops", "bytes", "minimum_bytes"),
        },
    }


DRY = "--dry-run --device cpu --device-memory 80"


def attention_benchmark(flags: str, folder: Path) -> dict:
    """The predicted rows of the sweep over implementations, head dimensions and lengths."""
    run("run_study.py", f"attention {DRY} {flags}", folder)
    return {
        f"{row['implementation']} {row['dtype']} {row['batch_size']}x{row['seq_len']}"
        f" d_head {row['d_head']}": {
            "predicted_memory_bytes": row["predicted_memory_bytes"],
            "predicted_peak_bytes": row["predicted_peak_bytes"],
            "tensors": len(row["tensors"]),
        }
        for row in read(folder / "attention_benchmark.json")["rows"]
    }


def training_benchmark(flags: str, folder: Path) -> dict:
    """The predicted rows of the sweep over sizes and modes."""
    run("run_study.py", f"training {DRY} {flags}", folder)
    return {
        f"{row['size']} {row['batch_size']}x{row['seq_len']} {row['mode']} {row['precision']}": {
            "parameters": row["parameters"],
            "predicted_peak_bytes": row["predicted_peak_bytes"],
        }
        for row in read(folder / "training_benchmark.json")["rows"]
    }


def memory_study(flags: str, folder: Path) -> dict:
    """Measured peaks, each in a process of its own, and the formula fitted to them."""
    run("run_study.py", f"memory --device cpu --num-steps 2 {flags}", folder)
    from studies.memory import MemoryFit

    document = read(folder / "memory_study.json")
    fit = document["fit"]
    shares = MemoryFit.from_json(fit).shares
    return {
        "rows": {
            f"{row['batch_size']}x{row['seq_len']}": {
                "status": row["status"],
                "predicted_bytes": row["predicted_bytes"],
                "peak_bytes": row["peak_bytes"],
                "peak_phase": row["peak_phase"],
                "bytes_by_category": row["bytes_by_category"],
                "bytes_per_token": row["bytes_per_token"],
                "shares_of_fit": shares(row["batch_size"], row["seq_len"]),
            }
            for row in document["rows"]
        },
        "fit": {name: fit[name] for name in ("constant_bytes", "linear_bytes", "quadratic_bytes")},
        "memory_factors": [row["memory_factor"] for row in document["factors"]],
    }


def trace(name: str, folder: Path) -> dict:
    """Where the time of a recorded trace went."""
    run("run_pytorch_profiler.py", f"--analyze-existing {shlex.quote(str(GOLDEN / name))}", folder)
    document = read(folder / "operator_analysis.json")
    timeline = document["gpu_timeline"]
    times = (
        "total_ms",
        "computation_ms",
        "exposed_comm_ms",
        "exposed_memcpy_ms",
        "busy_ms",
        "idle_ms",
    )
    return {
        "steps": {
            name: document["steps"][name]
            for name in ("count", "mean_ms", "median_ms", "min_ms", "max_ms")
        },
        "ms_per_step": document["attribution"]["ms_per_step"],
        "unattributed_share": document["attribution"]["unattributed_share"],
        "verdict_shares": document["verdict"]["shares"],
        "phases": by_name(document["phases"], "phase", "ms_per_step", "share"),
        "components": by_name(
            document["components"], "component", "ms_per_step", "std_ms", "share", "phases_ms"
        ),
        "classes": by_name(document["classes"], "class", "ms_per_step", "share"),
        "operators": by_name(
            document["operators"],
            "name",
            "calls",
            "self_cpu_us",
            "self_device_us",
            "flops",
            "bytes",
        ),
        "kernels": by_name(document["kernels"], "name", "count", "total_us", "p95_us"),
        "gpu_timeline": {name: timeline[name] for name in times},
        "idle_by_cause": (
            timeline["idle_by_cause"] and by_name(timeline["idle_by_cause"], "cause", "ms")
        ),
        "opportunities": [
            {
                name: row[name]
                for name in ("share", "ms_per_step", "speedup_bound", "speedup_estimate")
            }
            for row in document["opportunities"]
        ],
    }


KINDS: dict[str, tuple[Callable[[str, Path], dict], dict[str, str]]] = {
    "predictions": (
        prediction,
        {"default fp32": "", "two layers": f"--n-layers 2 {VARIANTS['bf16 sdpa checkpointing']}"}
        | {"one layer of very_large": "--size very_large --n-layers 1"}
        | {"one layer, compiled": f"{SMALL} --n-layers 1 --compile --device-memory 1.1"},
    ),
    "losses": (
        losses,
        {
            name: f"{SMALL} --num-steps 6 --learning-rate 1e-3 {flags}"
            for name, flags in VARIANTS.items()
        }
        | {"text": f"{SMALL} --num-steps 12 --learning-rate 1e-2 --data TEXT"},
    ),
    "memory": (memory, {name: f"{SMALL} {VARIANTS[name]}" for name in COUNTED_VARIANTS}),
    "flops": (
        flops,
        {name: f"{SMALL} {VARIANTS[name]}" for name in COUNTED_VARIANTS}
        | {"size tiny": "--size tiny"},
    ),
    "attention_benchmark": (
        attention_benchmark,
        {
            "fp32": "--dtypes fp32 --d-heads 16 --seq-lens 256 1024",
            "bf16 causal": (
                "--dtypes bf16 --causal --implementations eager sdpa --d-heads 64 --seq-lens 4096"
            ),
        },
    ),
    "training_benchmark": (training_benchmark, {"fp32": "--sizes tiny small"}),
    "memory_study": (
        memory_study,
        {"small model": f"{SMALL_MODEL} --batch-sizes 4 --seq-lens 8 16 24"},
    ),
    "traces": (trace, {"CPU": "cpu.pt.trace.json.gz", "GPU": "gpu.pt.trace.json.gz"}),
}


# ---- Recorded and compared -----------------------------------------------------------------------


def processor() -> str:
    """The CPU as the system names it, with what libraries choose their instructions by."""
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        facts = {name.strip(): value.strip() for name, _, value in lines}
        if "model name" in facts:
            family = "/".join(facts.get(name, "?") for name in ("cpu family", "model", "stepping"))
            return f"{facts['model name']} ({family}, {torch.backends.cpu.get_cpu_capability()})"
    return platform.processor() or platform.machine()


def machine() -> dict[str, str]:
    return {"torch": torch.__version__, "processor": processor()}


def tolerance(kind: str, recorded_with: dict[str, str]) -> float:
    """How far apart two floats may be, relative to the larger; integers must be equal."""
    if kind == "traces":
        return 1e-12  # times are sums, and may be added up in another order
    if kind == "memory_study":
        return 1e-9  # a fit by least squares
    if kind == "losses" and recorded_with != machine():
        return 1e-4  # other instructions round differently, and each step carries that on
    return 0.0


def named_as_today(recorded):
    """A recorded value with the names of today."""
    if isinstance(recorded, dict):
        return {RENAMED.get(name, name): named_as_today(value) for name, value in recorded.items()}
    if isinstance(recorded, list):
        return [named_as_today(value) for value in recorded]
    return RENAMED.get(recorded, recorded) if isinstance(recorded, str) else recorded


def differences(recorded, found, allowed: float, path: str = "") -> Iterator[str]:
    """A line for each figure that moved."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for name in sorted({*recorded, *found}):
            where = f"{path}.{name}" if path else name
            if name not in found or name not in recorded:
                yield f"{where}: {'is gone' if name in recorded else 'is new'}"
            else:
                yield from differences(recorded[name], found[name], allowed, where)
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for i, (one, other) in enumerate(zip(recorded, found, strict=True)):
            yield from differences(one, other, allowed, f"{path}[{i}]")
    elif isinstance(recorded, float) and isinstance(found, float):
        if not math.isclose(recorded, found, rel_tol=allowed, abs_tol=allowed):
            yield f"{path}: {recorded!r} was recorded, now it is {found!r}"
    elif recorded != found or type(recorded) is not type(found):
        yield f"{path}: {recorded!r} was recorded, now it is {found!r}"


# One case of each kind, and both traces, are enough while working.
FAST = {
    ("predictions", "default fp32"),
    ("losses", "fp32"),
    ("losses", "sdpa"),
    ("memory", "fp32"),
    ("flops", "fp32"),
}


def marks_of(kind: str, case: str) -> list[pytest.MarkDecorator]:
    marks = [] if (kind, case) in FAST or kind == "traces" else [pytest.mark.slow]
    reason = "PyTorch 2.6 runs slice_backward for each slice, an operator and a tensor more"
    if kind in ("memory", "flops"):
        marks.append(pytest.mark.skipif(torch.__version__ < (2, 7), reason=reason))
    return marks


CASES = [
    pytest.param(kind, case, marks=marks_of(kind, case))
    for kind, (_, cases) in KINDS.items()
    for case in cases
]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_no_figure_moves(kind, case, tmp_path):
    golden = read(GOLDEN / f"{kind}.json")
    figures_of, cases = KINDS[kind]
    recorded, found = (
        named_as_today(golden["figures"][case]),
        figures_of(cases[case], tmp_path / "run"),
    )
    moved = list(differences(recorded, found, tolerance(kind, golden["recorded_with"])))
    here, there = machine(), golden["recorded_with"]
    note = "" if here == there else f"\nRecorded with {there}, this is {here}"
    assert not moved, f"{len(moved)} figures moved:\n" + "\n".join(moved[:40]) + note


def test_every_recorded_case_is_compared():
    for kind, (_, cases) in KINDS.items():
        assert read(GOLDEN / f"{kind}.json")["figures"].keys() == cases.keys(), kind


def test_a_moved_figure_is_found():
    recorded = {"bytes": 10, "rows": [{"ms": 1.0}], "matrix product": {"calls": 2}}
    assert not list(differences(recorded, json.loads(json.dumps(recorded)), 0.0))
    assert list(differences(recorded, recorded | {"bytes": 11}, 1e-4)) == [
        "bytes: 10 was recorded, now it is 11"
    ]
    assert list(differences(recorded, recorded | {"rows": [{"ms": 1.0 + 1e-15}]}, 0.0))
    assert not list(differences(recorded, recorded | {"rows": [{"ms": 1.0 + 1e-15}]}, 1e-12))
    assert list(differences(recorded, {"bytes": 10, "rows": []}, 0.0)) == [
        "matrix product: is gone",
        "rows: [{'ms': 1.0}] was recorded, now it is []",
    ]


def text_of(document: dict) -> str:
    """JSON with sorted keys, in which a row of numbers is one line."""
    text = json.dumps(document, indent=1, sort_keys=True, allow_nan=False)
    return (
        re.sub(
            r"([\[{])([^\[\]{}]+)([\]}])",
            lambda row: row[1] + " ".join(row[2].split()) + row[3],
            text,
        )
        + "\n"
    )


def record(kinds: list[str]) -> None:
    """Write golden/ from the working tree."""
    for kind in kinds:
        figures_of, cases = KINDS[kind]
        with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
            figures = {
                case: figures_of(flags, Path(scratch) / case) for case, flags in cases.items()
            }
        document = {"recorded_with": machine(), "figures": figures}
        file = GOLDEN / f"{kind}.json"
        file.write_text(text_of(document))
        print(f"{file}: {len(figures)} cases")


if __name__ == "__main__":
    sys.path.insert(0, str(PROJECT))
    parser = argparse.ArgumentParser(
        description="Record the figures of the working tree in golden/."
    )
    parser.add_argument("--record", nargs="*", choices=list(KINDS), required=True, metavar="FILE")
    record(parser.parse_args().record or [*KINDS])
