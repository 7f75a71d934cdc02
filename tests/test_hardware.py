"""What a device could do: datasheets, never borrowed, and measurements, kept for the machine."""

import json
import re

import pytest
import torch

from analysis.hardware import cache, measuring
from analysis.hardware.achievable import achievable_rates
from analysis.hardware.ceilings import bandwidth_ceilings, compute_ceilings
from analysis.hardware.datasheets import DATASHEETS
from analysis.hardware.matching import datasheet, described, rows_named, with_arch
from analysis.hardware.measuring import Measurement
from harness.base.errors import UserError

CPU = {"type": "cpu", "name": "a CPU"}
H200 = {"type": "cuda", "name": "NVIDIA H200", "arch": "sm_90", "compute_units": 132}
NAMELESS = {"name": "AMD Radeon Graphics", "arch": "gfx942:sramecc+:xnack-", "compute_units": 304}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose matmuls reach the next rate of the list; the rest of the list is what was not
    asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rates = []
    monkeypatch.setattr(
        measuring, "measured_flops", lambda *a: Measurement(rates.pop(0), "matmuls")
    )
    monkeypatch.setattr(
        measuring, "measured_bandwidth", lambda *a: Measurement(rates.pop(0), "copies")
    )
    return rates


@pytest.mark.parametrize(
    ("device", "precision", "tflops"),
    [
        ({"name": "NVIDIA H200", "arch": "sm_90", "compute_units": 132}, "bf16", 989.0),
        ({"name": "NVIDIA L40S", "arch": "sm_89", "compute_units": 142}, "fp32", 91.6),
        ({"name": "NVIDIA L4", "arch": "sm_89", "compute_units": 58}, "fp32", 30.3),
        (
            {
                "name": "AMD Instinct MI250X / MI250",
                "arch": "gfx90a:sramecc+:xnack-",
                "compute_units": 110,
            },
            "bf16",
            191.5,
        ),
        (
            {
                "name": "AMD Instinct MI250X / MI250",
                "arch": "gfx90a:sramecc+:xnack-",
                "compute_units": 104,
            },
            "bf16",
            181.0,
        ),
        (
            {"name": "AMD Radeon Graphics", "arch": "gfx942:sramecc+:xnack-", "compute_units": 228},
            "fp32",
            122.6,
        ),
        (
            {"name": "AMD Instinct MI300X", "arch": "gfx942:sramecc+:xnack-", "compute_units": 38},
            "bf16",
            1307.4 / 8,
        ),
        (
            {"name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "arch": "sm_90", "compute_units": 16},
            "bf16",
            989.4 * 16 / 132,
        ),
    ],
)
def test_datasheet_rows(machine, device, precision, tflops):
    machine.append(1.0)
    peak, measured = compute_ceilings(device | {"type": "cuda"}, precision)
    assert peak.rate == pytest.approx(tflops * 1e12)
    assert (peak.kind, measured.kind) == ("datasheet", "measured")


@pytest.mark.parametrize(
    "device",
    [
        {"name": "NVIDIA H800", "arch": "sm_90", "compute_units": 132},
        {"name": "NVIDIA H200 NVL", "arch": "sm_90", "compute_units": 132},
        {"name": "NVIDIA GeForce RTX 4090 Laptop GPU", "arch": "sm_89", "compute_units": 76},
        {"name": "NVIDIA GeForce RTX 3090 Ti", "arch": "sm_86", "compute_units": 84},
        {"name": "AMD Radeon Graphics", "arch": "gfx1100"},
        {"name": "AMD Radeon Graphics", "arch": "gfx942", "compute_units": 304},  # MI300X or MI325X
        {"name": "NVIDIA B100", "arch": "sm_100", "compute_units": 148},
    ],
)
def test_an_unknown_device_borrows_nothing(device):
    assert datasheet(device) is None


def test_every_row_has_a_source_and_is_found_by_its_name():
    for row in DATASHEETS:
        assert row.source
        assert datasheet(
            {"name": row.name, "arch": row.arch, "compute_units": row.compute_units}
        ) == (row, 1.0)


@pytest.mark.parametrize(
    ("memory", "name"), [(192 * 2**30, "MI300X"), (256 * 2**30, "MI325X"), (64 * 2**30, None)]
)
def test_memory_tells_nameless_devices_apart(memory, name):
    found = datasheet(NAMELESS | {"memory_bytes": memory})
    assert (found and found[0].name.split()[-1]) == name


def test_a_part_of_a_device_has_a_part_of_both_rates(machine):
    machine += [1e12, 1e12]
    part = {"type": "cuda", "name": "AMD Instinct MI300X", "arch": "gfx942", "compute_units": 38}
    assert compute_ceilings(part, "bf16")[0].rate == pytest.approx(1307.4e12 / 8)
    assert bandwidth_ceilings(part)[0].rate == pytest.approx(5300e9 / 8)
    assert datasheet({"name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "arch": "sm_90"}) is None


@pytest.mark.parametrize(("units", "name"), [(104, "MI250"), (110, "MI250X")])
def test_a_name_for_two_parts_is_settled_by_compute_units(units, name):
    found = datasheet(
        {
            "name": "AMD Instinct MI250X / MI250",
            "arch": "gfx90a:sramecc+:xnack-",
            "compute_units": units,
        }
    )
    assert found[0].name == f"AMD Instinct {name}"


def test_a_name_of_older_builds():
    assert datasheet({"name": "Radeon RX 7900 XTX", "arch": "gfx1100"})[0].bandwidth == 960


def test_of_all_that_is_known_the_choice_comes_first(machine):
    machine += [5e14, 4e12]
    for choice, kinds in (
        ("auto", ["datasheet", "measured"]),
        ("measured", ["measured", "datasheet"]),
    ):
        assert [one.kind for one in compute_ceilings(H200, "bf16", choice)] == kinds
        assert [one.kind for one in bandwidth_ceilings(H200, choice)] == kinds
    given, sheet, measured = compute_ceilings(H200, "bf16", 700.0)
    assert (given.rate, given.label) == (7e14, "given: --peak 700")
    assert (sheet.rate, measured.rate) == (989e12, 5e14)
    assert not machine


def test_a_precision_without_a_path_has_no_datasheet_peak(machine):
    machine.append(1e12)
    v100 = {"type": "cuda", "name": "Tesla V100-SXM2-32GB", "arch": "sm_70", "compute_units": 80}
    assert [one.kind for one in compute_ceilings(v100, "bf16")] == ["measured"]


def test_a_machine_is_measured_once_for_each_precision_and_thread_count(
    machine, tmp_path, monkeypatch
):
    machine += [1e11, 2e11, 3e11]
    assert compute_ceilings(CPU, "fp32")[0].rate == 1e11
    again = compute_ceilings(CPU, "fp32")[0]
    assert again.rate == 1e11
    assert "measured_peaks.json" in again.source
    assert compute_ceilings(CPU, "bf16")[0].rate == 2e11
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert compute_ceilings(CPU, "fp32")[0].rate == 3e11
    kept = json.loads((tmp_path / "cache" / "tiny_llama" / "measured_peaks.json").read_text())
    assert len(kept) == 1 + 3


def test_a_measurement_below_what_a_model_reached_is_repeated(machine):
    machine += [1e11, 3e11, 3.5e11, 3.6e11]
    assert compute_ceilings(CPU, "fp32")[0].rate == 1e11
    assert compute_ceilings(CPU, "fp32", reached=2e11)[0].rate == 3e11
    assert compute_ceilings(CPU, "fp32", reached=2e11)[0].rate == 3e11
    assert compute_ceilings(CPU, "fp32", reached=4e11) == []  # what a model surpasses is no ceiling
    assert compute_ceilings(CPU, "fp32")[0].rate == 3.5e11  # the best of all visits
    assert machine == [3.6e11]


def disturb(monkeypatch, *waits, gpu=()):
    """What DisturbanceMeter tells about the next measurements: shares of waiting, or what it saw of
    the GPU."""
    found = [
        {
            "gpu": None,
            "disturbed": share > 0.05,
            "reasons": [f"{share:.0%} of thread time waited for a core"],
            "lost_share": share,
            "load_before": None,
            "cores": 2,
        }
        for share in waits
    ]
    found += [
        {"disturbed": True, "lost_share": 0.1, "gpu": {"memory_in_use_mb": 0.0} | one}
        for one in gpu
    ]  # the host always waited
    monkeypatch.setattr(measuring, "watch", lambda device_type, measure: (measure(), found.pop(0)))


def test_a_disturbed_measurement_is_marked_and_repeated_until_one_is_not(
    machine, tmp_path, monkeypatch
):
    machine += [4.0e9, 13.9e9]
    disturb(monkeypatch, 0.31, 0.0)
    first = bandwidth_ceilings(CPU)[0]
    assert (
        "DISTURBED: 31% of thread time waited for a core; times may be up to 45% too long"
        in first.source
    )
    assert first.source.endswith("; will be measured again next time")
    second = bandwidth_ceilings(CPU)[0]
    assert (second.rate, "DISTURBED" in second.source) == (13.9e9, False)
    assert bandwidth_ceilings(CPU)[0] == second  # from the cache: no third measurement
    (entry,) = (
        entry
        for entry in json.loads(
            (tmp_path / "cache" / "tiny_llama" / "measured_peaks.json").read_text()
        ).values()
        if isinstance(entry, dict)
    )
    assert entry["when"]
    assert (entry["threads"], entry["disturbed"], entry["disturbance"]) == (
        torch.get_num_threads(),
        False,
        "none seen",
    )


def test_a_worse_visit_lowers_no_peak(machine, monkeypatch, capsys):
    machine += [13.9e9, 4.0e9]
    disturb(monkeypatch, 0.31, 0.04)
    assert bandwidth_ceilings(CPU)[0].rate == 13.9e9
    again = bandwidth_ceilings(CPU)[0]
    assert (again.rate, "DISTURBED" in again.source) == (13.9e9, False)


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        ({"other_processes": 2, "lowered_by": {}}, "2 other processes on the GPU"),
        (
            {"other_processes": 0, "lowered_by": {"heat (HBM)": 0.4}},
            "GPU clocks lowered by heat (HBM) for 40% of the",
        ),
    ],
)
def test_a_disturbed_measurement_of_a_gpu_is_repeated_too(machine, monkeypatch, seen, text):
    machine += [2e12, 4e12, 3e12]
    disturb(monkeypatch, gpu=[seen, {"other_processes": 0, "lowered_by": {"heat (HBM)": 0.01}}])
    sources = [bandwidth_ceilings(H200, "measured")[0].source for _ in range(3)]
    assert f"DISTURBED: {text}" in sources[0]
    assert "will be measured again next time" in sources[0]
    assert "DISTURBED" not in sources[1]
    assert sources[2] == sources[1]
    assert machine == [3e12]


def test_what_disturbs_a_measurement_is_kept_as_text(monkeypatch):
    unknown = {"disturbed": None, "disturbed_reason": "no /proc"}
    monkeypatch.setattr(measuring, "watch", lambda device_type, measure: (measure(), unknown))
    assert measuring.watched("cpu", lambda: Measurement(1.0, "x")) == Measurement(
        1.0, "x", False, "unknown: no /proc"
    )
    gpu = {
        "other_processes": None,
        "other_processes_reason": "no library",
        "lowered_by": {},
        "memory_in_use_mb": 9.0,
    }
    monkeypatch.setattr(measuring, "watch", lambda device_type, measure: (measure(), {"gpu": gpu}))
    assert (
        measuring.watched("cuda", lambda: Measurement(1.0, "x")).disturbance
        == "unknown: no library"
    )


def test_what_is_unknown_is_not_measured_where_nothing_may_be(machine):
    machine += [1e11, 1e10]
    assert (
        compute_ceilings(CPU, "fp32", measure="kept")
        == bandwidth_ceilings(CPU, measure="kept")
        == []
    )
    known = compute_ceilings(CPU, "fp32")
    assert compute_ceilings(CPU, "fp32", measure="kept") == known
    assert compute_ceilings(CPU, "fp32", measure="never") == []
    assert machine == [1e10]


@pytest.mark.parametrize(
    "other",
    [
        {"version": "1.0"},
        {"threads": 7},
        {"node": "another"},
        {"device": {"name": "another CPU"}},
        {"device": {"arch": "x86_64"}},
        {"device": {"compute_units": 9}},
        {"precision": "bf16"},
    ],
    ids=str,
)
def test_what_was_measured_of_something_else_is_measured_anew(machine, monkeypatch, other):
    machine += [1e11, 2e11]

    def flops(precision="fp32", **device) -> float:
        return cache.measured(CPU | device, precision, "flops").rate

    monkeypatch.setattr(measuring, "watched", lambda device_type, work: work())
    assert flops() == flops() == 1e11
    if "version" in other:
        monkeypatch.setattr(torch, "__version__", other["version"])
    if "threads" in other:
        monkeypatch.setattr(torch, "get_num_threads", lambda: other["threads"])
    if "node" in other:
        monkeypatch.setattr("platform.node", lambda: other["node"])
    device = other.get("device", {})
    assert flops(other.get("precision", "fp32"), **device) == 2e11
    assert flops(other.get("precision", "fp32"), **device) == 2e11
    assert machine == []


def test_what_a_narrow_type_gains_is_timed():
    gain = cache.measured({"type": "cpu", "name": "a CPU"}, "bf16", "gain")
    assert 0.001 < gain.rate < 1000  # other processes may disturb one of the two
    assert "512 x 512" in gain.source


@pytest.mark.parametrize(("slower", "rounds"), [(0.5, measuring.ROUNDS), (100.0, 1)])
def test_an_emulated_type_is_not_timed_for_long(monkeypatch, slower, rounds):
    timed = []

    def durations(device_type, work, seconds):
        timed.append(work.args[0].dtype)
        return [slower if timed[-1] == torch.bfloat16 else 1.0]

    monkeypatch.setattr(measuring, "durations", durations)
    assert measuring.measured_gain("cpu", "bf16").rate == 1 / slower
    assert timed == rounds * [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("MI250X", ["AMD Instinct MI250X"]),
        ("mi300x", ["AMD Instinct MI300X"]),
        ("AMD Instinct MI355X", ["AMD Instinct MI355X"]),
        ("h100", ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"]),
        ("H100 pcie", ["NVIDIA H100 PCIe"]),
        ("h200", ["NVIDIA H200"]),
        ("b200", ["NVIDIA B200"]),
        ("rtx 4090", ["NVIDIA GeForce RTX 4090"]),
    ],
)
def test_rows_are_found_by_parts_of_their_name(text, names):
    assert [row.name for row in rows_named(text)] == names


@pytest.mark.parametrize(
    ("text", "nearest"), [("MI300", "MI300X"), ("H21", "H200"), ("", ""), ("NVIDIA", "")]
)
def test_an_unknown_name_is_answered_with_the_nearest_rows(text, nearest):
    with pytest.raises(UserError, match=f"nearest: .*{nearest}") as refused:
        rows_named(text)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "units", "row"),
    [
        ("AMD Instinct MI250X/MI250", 110, "AMD Instinct MI250X"),
        ("AMD Instinct MI250X / MI250", 104, "AMD Instinct MI250"),
        ("AMD Radeon Graphics", 104, "AMD Instinct MI210"),  # or MI250: the same figures
        ("AMD Radeon Graphics", 228, None),  # of 64 GB there is none
        ("NVIDIA Graphics Device", 104, None),
    ],
)
def test_a_device_is_found_by_what_a_trace_tells(name, units, row):
    """Older ones give no architecture."""
    device = {"name": name, "version": "", "compute_units": units, "memory_bytes": 68702699520}
    found = datasheet(with_arch(device, []))
    assert (found and found[0].name) == row


@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"schema_version": 1}', '{"schema_version": 2}', "entries", "a folder"]
)
def test_a_damaged_cache_is_measured_anew(machine, tmp_path, damage):
    file = tmp_path / "cache" / "tiny_llama" / "measured_peaks.json"
    file.parent.mkdir(parents=True)
    machine += [1e11, 1e11, 2e11]
    if damage == "entries":
        compute_ceilings(CPU, "fp32")
        kept = json.loads(file.read_text())
        file.write_text(
            json.dumps({key: {} if isinstance(kept[key], dict) else kept[key] for key in kept})
        )
    elif damage == "a folder":
        file.mkdir()
    else:
        file.write_text(damage)
    del machine[:-2]
    assert compute_ceilings(CPU, "fp32")[0].rate == 1e11
    assert compute_ceilings(CPU, "fp32")[0].rate == (2e11 if damage == "a folder" else 1e11)


def test_no_memory_to_measure_in_is_no_ceiling(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "SQUARES", {"cpu": (2**24,)})
    monkeypatch.setattr(measuring, "COPIED_BYTES", {"cpu": 2**50})
    assert compute_ceilings(CPU, "fp32") == bandwidth_ceilings(CPU) == []


@pytest.mark.slow
def test_matmuls_and_copies_are_measured_for_real(monkeypatch):
    monkeypatch.setattr(measuring, "SQUARES", {"cpu": (64, 256)})
    monkeypatch.setattr(measuring, "COPIED_BYTES", {"cpu": 2**24})
    monkeypatch.setattr(measuring, "SECONDS", 0.02)
    before = torch.get_float32_matmul_precision()
    fp32 = measuring.measured_flops("cpu", "fp32")
    assert 1e9 < fp32.rate < 1e14
    assert "256 in fp32" in fp32.source
    layouts = []
    monkeypatch.setattr(
        torch,
        "mm",
        lambda a, b, out: layouts.append((a.dtype, a.is_contiguous(), b.is_contiguous())),
    )
    measuring.measured_flops("cpu", "bf16")
    assert set(layouts) == {
        (torch.bfloat16, a, b) for a, b in ((True, False), (True, True), (False, True))
    }
    assert 1e8 < measuring.measured_bandwidth("cpu").rate < 1e13
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.gpu
def test_matmuls_reach_no_more_than_the_datasheet_says():
    from harness.machine.environment import describe_device

    device = describe_device(torch.device("cuda")).as_json()
    for precision in ("fp32", "bf16"):
        ceilings = {one.kind: one.rate for one in compute_ceilings(device, precision)}
        assert ceilings["measured"] < 1.1 * ceilings.get("datasheet", ceilings["measured"])


def test_a_copy_moves_each_byte_twice(monkeypatch):
    """It is read once and written once."""
    monkeypatch.setitem(measuring.COPIED_BYTES, "cpu", 4096)
    monkeypatch.setattr(measuring, "durations", lambda *_: [0.5, 0.25])
    assert measuring.measured_bandwidth("cpu").rate == 2 * 4096 / 0.25


# ---- Cards that are several devices --------------------------------------------------------------


@pytest.mark.parametrize(
    ("units", "memory_gb", "known"),
    [
        (38, 24, ("AMD Instinct MI300X", 1 / 8)),
        (38, 32, ("AMD Instinct MI325X", 1 / 8)),
        (76, 40, ("AMD Instinct MI300A", 1 / 3)),
        (38, 192, None),
    ],
)
def test_a_part_of_a_card_without_a_name_is_told_by_its_size(units, memory_gb, known):
    device = NAMELESS | {"compute_units": units, "memory_bytes": memory_gb * 2**30}
    found = datasheet(device)
    assert (found and (found[0].name, found[1])) == known


@pytest.mark.parametrize(
    ("card", "units", "memory_gb"),
    [
        ("MI300X:SPX", 304, 192),
        ("MI300X:DPX", 152, 96),
        ("MI300X:QPX", 76, 48),
        ("mi300x:cpx", 38, 24),
        ("MI300A:TPX", 76, 39.7),
        ("MI300A:CPX", 38, 19.9),
        ("MI350X:DPX", 128, 144),
    ],
)
def test_a_part_of_a_card_is_a_device(card, units, memory_gb):
    (row,) = rows_named(card)
    assert (row.compute_units, row.memory_mb / 1024) == (units, pytest.approx(memory_gb, rel=0.01))
    whole = rows_named(card.partition(":")[0])[0]
    assert row.bf16 / row.compute_units == pytest.approx(whole.bf16 / whole.compute_units)
    assert datasheet(described(row)) == (row, 1.0)
    assert (achievable_rates(row) is None) is (row.name != "AMD Instinct MI300X")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("MI300A:QPX", "AMD Instinct MI300A has the modes SPX, TPX, CPX"),
        ("H100:CPX", "NVIDIA H100 80GB HBM3 has no such modes"),
        ("MI250X:CPX", "each of its two dies (GCDs) is a device of its own"),
        ("MI250X:memory=128", "the device is one of its two dies (GCDs), with 64 GB"),
    ],
)
def test_a_part_that_a_card_does_not_have(asked, words):
    with pytest.raises(UserError, match=re.escape(words)) as raised:
        rows_named(asked)
    assert raised.value.exit_code == 2


def test_a_rate_is_two_flops_for_each_product_by_the_time_of_the_best_matmul(monkeypatch):
    """The clock is made up: the best call takes a millisecond."""
    monkeypatch.setattr(measuring, "durations", lambda device_type, work, seconds: [2e-3, 1e-3])
    largest = max(measuring.SQUARES["cpu"])
    rate = measuring.measured_flops("cpu", "fp32", 1).rate
    assert rate == pytest.approx(2 * largest**3 / 1e-3)
