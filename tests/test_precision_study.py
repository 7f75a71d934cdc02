"""Precision: data types found by hooks, range and precision of formats, rounding of sums, and the
study."""

import functools
import itertools
import json
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import run_command

import run_study
import tiny_llama_v1 as tiny_llama
from harness.base.sections import as_text
from harness.machine import devices
from harness.model.workload import TrainingState
from studies.engine import isolation
from studies.engine.columns import compared
from studies.engine.command_line import workload_of
from studies.engine.device import unsupported_precisions
from studies.precision import ToyModel, data_types, dtype_sections, side_by_side, types_in_a_step
from studies.precision_parts.number_formats import accumulation, formats, squares

CPU = torch.device("cpu")
needs_fp16 = pytest.mark.skipif(
    not devices.cpu_trains_in_fp16(), reason="this CPU or build has no fp16 autocast"
)


# ---- Data types ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bf16", pytest.param("fp16", marks=needs_fp16)])
def found(request):
    rows = data_types(request.param, CPU)
    types = {}
    for row in rows:
        if row.what != "part":
            types[row.model, row.what, row.name] = row.dtype
    return request.param, rows, types


def test_types_of_the_toy_model_are_those_of_its_operators(found):
    name, _, types = found
    low = devices.PRECISIONS[name]
    x, model = torch.randn(8, 20), ToyModel(20, 5)
    expected = {}
    with torch.autocast("cpu", dtype=low):
        for part in ("fc1", "relu", "ln", "fc2"):
            x = getattr(model, part)(x)
            expected[part] = str(x.dtype).removeprefix("torch.")
    assert {part: types["ToyModel", "output", part] for part in expected} == expected
    assert (
        types["ToyModel", "logits", "model"] == expected["fc2"] == str(low).removeprefix("torch.")
    )
    assert types["ToyModel", "loss", "model"] == "float32"


def test_matmuls_have_16_bits_and_parameters_and_states_32(found):
    name, rows, types = found
    low = str(devices.PRECISIONS[name]).removeprefix("torch.")
    for (_, what, where), dtype in types.items():
        narrow = what == "logits" or (
            what == "output" and where.endswith(("_proj", "lm_head", "fc1", "fc2"))
        )
        if narrow:
            assert dtype == low, where
        elif what != "output":
            assert dtype == "float32", (what, where)
    for where in ("embedding", "rope", "norm", "layers.*.attention_norm", "layers.*.mlp_norm"):
        assert types["TinyLlamaModel", "output", where] == "float32"
    parts = {(row.name, row.dtype) for row in rows if row.what == "part"}
    assert {
        ("layers.*.attention.softmax", "float32"),
        ("layers.*.attention.weighted_sum", low),
    } <= parts
    assert ("layers.*.attention.softmax", low) not in parts or (
        "layers.*.attention.softmax",
        "float32",
    ) in parts


def test_each_tensor_is_counted_once(found):
    _, rows, _ = found
    for model, tensors in (("TinyLlamaModel", 3 + 2 * 9), ("ToyModel", 4)):
        counts = dict.fromkeys(("parameter", "gradient", "optimizer state"), 0)
        for row in rows:
            if row.model == model and row.what in counts:
                counts[row.what] += row.count
        assert counts == {"parameter": tensors, "gradient": tensors, "optimizer state": 3 * tensors}


def test_a_model_in_bfloat16_throughout():
    """The types are found, not assumed."""
    model = ToyModel(20, 5).to(torch.bfloat16)
    batch = torch.randn(8, 20, dtype=torch.bfloat16), torch.randint(5, (8,))
    scaler, autocast = (
        torch.amp.GradScaler("cpu", enabled=False),
        torch.autocast("cpu", enabled=False),
    )
    state = TrainingState(model, torch.optim.AdamW(model.parameters()), scaler, autocast)
    rows = types_in_a_step(state, itertools.repeat(batch), "bf16")
    others = {(row.what, row.name) for row in rows if row.dtype != "bfloat16"}
    assert others == {("optimizer state", "step")}
    (line,) = [line for line in side_by_side(rows) if line.name == "step"]
    assert (line.count, line.dtypes) == (4, {"bf16": "float32"})


def test_a_type_that_was_not_run_is_not_mentioned():
    text = []
    for section in dtype_sections(data_types("bf16", CPU), {"fp16": "why it cannot"}, CPU):
        text += as_text(section, 0)
    assert "Not run under fp16: why it cannot" in text
    assert not any(
        "float16" in line.replace("bfloat16", "") or "under fp16  " in line for line in text
    )


# ---- Range ---------------------------------------------------------------------------------------


def float32_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def test_formats_are_those_of_the_bits():
    rows = {row.type: row for row in formats()}
    for name, dropped in (
        ("float32", 0),
        ("tfloat32", 13),
        ("bfloat16", 16),
    ):  # bits that float32 has beyond
        row, one = rows[name], 1 << dropped
        assert row.largest == float32_of(0x7F800000 - one), name
        assert row.smallest_subnormal == float32_of(one)
        assert row.smallest_normal == float32_of(0x00800000)
        assert row.eps == float32_of(0x3F800000 + one) - 1
    half = np.finfo(np.float16)
    assert rows["float16"].largest == half.max == 65504
    assert rows["float16"].smallest_subnormal == half.smallest_subnormal
    assert [row.decimal_digits for row in rows.values()] == [
        np.finfo(np.float32).precision,
        3,
        2,
        half.precision,
    ]


@pytest.mark.parametrize("width", [32, 256, 768])
def test_limits_of_sums_of_squares(width):
    """By exact arithmetic: half a unit above the largest is inf, half of the smallest is 0.  A mean
    is computed from a sum in float32, so it is inf too where that sum is."""
    rows = {row.type: row for row in squares(width, CPU)}
    of_float32 = formats()[0].largest
    for kind in formats():
        if kind.type == "tfloat32":
            continue
        row, too_large = rows[kind.type], kind.largest * (1 + kind.eps / 4)
        x = row.sum_infinite_from
        assert width * (x / 2) ** 2 < too_large <= width * x**2
        x = row.mean_infinite_from
        assert (x / 2) ** 2 < too_large and width * (x / 2) ** 2 < of_float32
        assert x**2 >= too_large or width * x**2 > of_float32
        x = row.zero_up_to
        assert x**2 <= kind.smallest_subnormal / 2 < (2 * x) ** 2
        assert (row.written_out, row.rms_norm, row.layer_norm) == (row.type != "float16", 1, 1)


# ---- Accumulation --------------------------------------------------------------------------------


def bfloat16(x: float) -> float:
    """Round to the upper half of a float32: to the nearest, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return float32_of((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16)


ROUND = {
    "float32": lambda x: float(np.float32(x)),
    "float16": lambda x: float(np.float16(x)),
    "bfloat16": bfloat16,
}


def test_sums_are_those_of_rounding_by_hand():
    rows = accumulation(CPU)
    for row in rows:
        to, addend = ROUND[row.accumulator], ROUND[row.addend](0.01)
        sums, total = [], 0.0
        for _ in range(
            1000
        ):  # float64 holds the sum of two numbers of these types, so this rounds once
            total = to(total + addend)
            sums.append(total)
        assert row.result == total
        assert row.relative_error == pytest.approx(total / 10 - 1, rel=1e-9)
        stalled = next((n for n in range(1, 1000) if sums[n] == sums[n - 1]), None)
        assert row.first_lost_addition == (stalled and stalled + 1)
    assert {row.accumulator for row in rows if row.first_lost_addition} == {"bfloat16"}


# ---- The study -----------------------------------------------------------------------------------


study = functools.partial(run_command, run_study, "precision")


SMALL = (
    "--size tiny --seq-len 8 --batch-size 1 --repetitions 2 --warmup-steps 1 --device cpu".split()
)


def document_in(folder):
    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    return json.loads((folder / "precision_study.json").read_text(), parse_constant=refuse)


@pytest.mark.slow
def test_a_study_and_its_resumption(scratch, capfd, monkeypatch):
    smallest = tiny_llama.SIZES["tiny"] | {"vocab_size": 64, "hidden_dim": 32, "n_layers": 1}
    monkeypatch.setitem(tiny_llama.SIZES, "tiny", smallest)
    flags = [*SMALL, "--precisions", "fp32", "bf16"]
    assert study(*flags, "--output-dir", "run") == 0
    out = capfd.readouterr().out
    assert "No GPU" in out and "2 of 2: tiny bf16:" in out
    document = document_in(scratch / "run")
    assert [(row["precision"], row["status"]) for row in document["rows"]] == [
        ("fp32", "ok"),
        ("bf16", "ok"),
    ]
    model = tiny_llama.main([*SMALL[:6], "--device", "cpu", "--num-steps", "3"])
    printed = [
        line.split()[4].strip(",")
        for line in capfd.readouterr().out.splitlines()
        if line.startswith("Step ")
    ]
    fp32, bf16 = document["rows"]
    assert model == 0 and printed == [
        f"{fp32['first_loss']:.4f}",
        printed[1],
        f"{fp32['final_loss']:.4f}",
    ]
    assert fp32["first_loss"] != bf16["first_loss"] == pytest.approx(fp32["first_loss"], abs=0.05)
    parameters = workload_of(size="tiny", device="cpu").parameter_count()
    for row in document["rows"]:
        assert (
            row["step_ms"] > row["forward_ms"] > 0
            and row["predicted_peak_bytes"] > 4 * 4 * parameters
        )
        assert row["peak_bytes_reason"].startswith("only the allocator of a GPU")
    assert len(document["accumulation"]) == 5 and len(document["formats"]) == 4
    text = " ".join((scratch / "run" / "precision_study.md").read_text().split())
    assert (
        "| tiny | 1 | 8 | bf16 |" in text
        and "## Data types of ToyModel under autocast, on cpu" in text
    )
    assert (scratch / "run" / "precision_study.png").stat().st_size > 10_000

    (scratch / "run" / "precision_study.json").write_text(json.dumps(document | {"rows": [fp32]}))
    assert study(*flags, "--resume", "run") == 0
    out = capfd.readouterr().out
    assert "Resumed; finished rows: 1" in out and "1 of 1: tiny bf16:" in out
    assert document_in(scratch / "run")["rows"][0] == fp32
    assert study(*flags, "--repetitions", "3", "--resume", "run") == 2
    assert "started with repetitions 2, not 3" in capfd.readouterr().err


@pytest.mark.slow
def test_an_unsupported_precision_is_a_row_with_the_reason(scratch, monkeypatch, capfd):
    monkeypatch.setattr(devices, "cpu_trains_in_fp16", lambda: False)
    assert set(unsupported_precisions(CPU)) == {"tf32", "fp16"}
    assert study(*SMALL, "--dry-run", "--output-dir", "run") == 0
    document = document_in(scratch / "run")
    reasons = {row["precision"]: row["reason"] for row in document["rows"]}
    assert {row["status"] for row in document["rows"]} == {"skipped"}
    assert reasons["fp32"] == reasons["bf16"] == "--dry-run predicts only"
    assert (
        "cannot train in fp16 on this CPU" in reasons["fp16"] and "Matrix Cores" in reasons["tf32"]
    )
    assert {row["autocast"] for row in document["dtypes"]} == {"bf16"}
    assert "Not run under fp16: PyTorch" in (scratch / "run" / "precision_study.md").read_text()


def test_out_of_memory_and_failure_are_rows(scratch, monkeypatch, capfd):
    answers = iter([("oom", "why it did"), ("failed", "what it said")])
    monkeypatch.setattr(isolation, "in_fresh_process", lambda *work, **options: next(answers))
    assert study(*SMALL, "--precisions", "bf16", "fp32", "--output-dir", "run") == 1
    oom, failed = document_in(scratch / "run")["rows"]
    assert (oom["status"], oom["step_ms"], failed["status"], failed["step_ms"]) == (
        "oom",
        None,
        "failed",
        None,
    )
    assert oom["step_ms_reason"].startswith("oom: why it did")
    out, err = capfd.readouterr()
    assert f"oom, why it did; {oom['predicted_peak_bytes'] / 2**20:,.1f} MB predicted" in out
    assert "failed, what it said" in out and "1 of 2 rows failed" in err


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (
            "--precisions tf32 --device cpu",
            2,
            "--precisions tf32: TF32 exists only in Tensor Cores",
        ),
        ("--precisions fp8", 2, "fp8"),
        ("--repetitions 0", 2, "0 is not a whole number of at least 1"),
        ("--warmup-steps -1", 2, "--warmup-steps"),
        ("--size nano", 2, "nano"),
        ("--resume nowhere", 2, "has no precision_study.json"),
        ("--resume a --output-dir b", 2, "--output-dir"),
    ],
)
def test_wrong_input(scratch, capfd, flags, code, words):
    assert study(*flags.split()) == code
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and words in err
    assert not list(scratch.iterdir())


def test_the_interval_of_two_rows_has_the_errors_of_both():
    def row(step_ms, std_ms):
        quiet = {"disturbed": False, "lost_share": None, "disturbance": None}
        return SimpleNamespace(step_ms=step_ms, step_std_ms=std_ms, repetitions=10, **quiet)

    steady, unsteady = row(10.0, 0.01), row(20.0, 4.0)
    low, high = compared(steady, unsteady, "step").ratio_95
    assert low < 0.5 < high and high / low > 1.1
    inverse = compared(unsteady, steady, "step").ratio_95
    assert inverse == pytest.approx([1 / high, 1 / low])
