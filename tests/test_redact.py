"""A trace that is to be mailed names nobody and no machine, and its analysis stays the same."""

import json
import re

import pytest
from helpers import SMALL_MODEL
from traces import H100, SMALL, TORCH_1_8, event, real_path, step, write_trace

from analysis.diagnosis.traces import analyze_all
from analysis.trace.redact import Redaction, names_of
from analysis.trace.shrink import write_slim

SECRET = re.compile(r"alice|node17|acme|10\.1\.2\.3|cafe:1:2|train_secret|9f86d081", re.IGNORECASE)
FRAMES = (
    "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py(114);"
    " /home/alice/acme/train_secret.py(3): main"
)
UUID = "9f86d081-884c-4d63-a8f5-1a2b3c4d5e6f"


def planted() -> list[dict]:
    """Events with a user, a host and a path in every kind of field."""
    found = [
        event("alice: on node17 in /scratch/acme/run_1", 1, 90, kind="user_annotation"),
        event(f"load {UUID} s3://acme/data from alice@node17, 10.1.2.3 and [fe80::cafe:1:2]", 2, 5),
        event(
            "aten::mm", 20, 30,
            **{"Call stack": FRAMES, "Concrete Inputs": ["", "/home/alice/w", "node17:9"]},
        ),
        event("nn.Module: Linear_0", 11, 60, kind="python_function"),
        event("train_secret.py(3): main", 11, 60, kind="python_function"),
        event(
            "triton", 52, 5, kernel_file="/tmp/torchinductor_alice/ab.py", kernel_kwargs="acme=1",
            **{"of_alice": 3},
        ),
        event(
            "c10d::allreduce_", 60, 4,
            **{
                "Collective name": "allreduce", "Process Group Name": "acme_dp",
                "Process Group Description": "acme",
            },
        ),
        event(
            "kernel_of_alice", 70, 5, "kernel",
            **{"kernel": "/home/alice/k", "device": 0, "stream": 7},
        ),
        {
            "ph": "M", "name": "process_name", "pid": 1, "tid": 0,
            "args": {"name": "python acme.py --host node17"},
        },
        {"ph": "M", "name": "process_labels", "pid": 1, "tid": 0, "args": {"labels": "node17"}},
        {
            "ph": "M", "name": "thread_name", "pid": 1, "tid": 1,
            "args": {"name": "thread 1 (alice)"},
        },
        event("on", 3, 1, "on node17", thread="alice") | {"pid": "node17: 1", "host": "acme"},
        {
            "ph": "C", "name": "node17", "ts": 3, "pid": 1,
            "args": {"alice": 3, "more": {"node17": "alice"}},
        },
        {
            "ph": "s", "id": "acme", "pid": 1, "tid": 1, "ts": 25, "cat": "ac2g", "name": "ac2g",
            "sf": "acme",
        },
    ]  # fmt: skip
    return [*found, step(3, 0, 100)]


METADATA = {
    "traceName": "/home/alice/acme/trace.json",
    "host_name": "node17.cluster.acme.com",
    "username": "alice",
    "deviceProperties": [
        {
            "name": "NVIDIA H100 80GB HBM3", "numSms": 132, "uuid": f"GPU-{UUID}",
            "serial": "acme",
        }
    ],
    "distributedInfo": {
        "rank": 0, "world_size": 1, "backend": "nccl", "master": "10.1.2.3",
        "pg_config": [{"pg_name": "acme_dp", "pg_desc": "acme", "ranks": [0]}],
    },
    "hostInfo": {"name": "node17", "boot_id": UUID},
    "env": {"USER": "alice", "MASTER_ADDR": "node17", "SLURM_JOB_NAME": "acme"},
    "command": ["python", "/home/alice/acme/train_secret.py"],
    "schemaVersion": 1,
}  # fmt: skip


def test_what_was_planted_in_every_kind_of_field_is_gone(tmp_path, profiler):
    trace = write_trace(tmp_path / "node17_123.456.pt.trace.json", *planted(), **METADATA)
    for word in ("alice", "node17", "acme", UUID):
        assert len(re.findall(word, trace.read_text())) > 2
    code, out = profiler("--analyze-existing", str(trace), "--slim", "mailed.json", "--redact")
    assert code == 0, out
    text = (tmp_path / "mailed.json").read_text()
    assert not SECRET.search(text), SECRET.findall(text)
    told = next(line for line in out.splitlines() if line.startswith("Replaced: "))
    assert re.search(r"\d+ files", told) and re.search(r"\d+ names", told) and "2 groups" in told
    assert (
        re.search(r"left out: .*\btraceName\b", " ".join(out.split()))
        and "Stays: names of operators" in out
    )
    document = json.loads(text)
    assert (
        document["schemaVersion"] == 1
        and document["deviceProperties"][0]["name"] == "NVIDIA H100 80GB HBM3"
    )
    names = [one["name"] for one in document["traceEvents"]]
    assert {"aten::mm", "nn.Module: Linear_0", "ProfilerStep#3", "c10d::allreduce_"} <= {*names}


def test_the_same_has_the_same_stand_in_in_every_trace():
    """Those of several ranks still belong together, and files of a library keep their names."""
    first, second = Redaction(["alice"]), Redaction(["alice"])
    groups = [one.value("pg_name", "acme_dp", ()) for one in (first, second)]
    assert groups[0] == groups[1] != first.value("pg_name", "acme_tp", ())
    frame = "/opt/env/lib/python3.11/site-packages/torch/nn/modules/linear.py(114): forward"
    assert first.text(frame) == "linear.py(114): forward"
    assert first.text("torch/nn/modules/linear.py(114)") == "linear.py(114)"
    assert re.fullmatch(r"file_\w{6}\.py\(7\): step", first.text("train.py(7): step"))
    assert re.fullmatch(r"file_\w{6}\.py\(7\)", first.text(r"C:\Users\alice\train.py(7)"))


@pytest.mark.parametrize(
    "name",
    [
        "aten::_scaled_dot_product_flash_attention",
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>,"
            " std::array<char*, 1>>"
        ),
        "Cijk_Ailk_Bljk_HHS_BH_MT64x128x32_MI16x16x16x1_SN_1LDSB0_APM1_ABV0_ACE",
        "Torch-Compiled Region: 0/0",
        "## Call CompiledFxGraph fabc ##",
        "Optimizer.step#AdamW.step",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
        "FSDP::all_gather (layers.0)",
        "train/forward",
        "12.4 tokens/s",
    ],
)
def test_names_of_work_stay(name):
    assert Redaction(["alice"]).text(name) == name


def test_names_are_found_where_they_are_told(tmp_path):
    said = event(
        "run", 0, 1, note="USER=bob HOSTNAME=gpu-3", user="carol@acme.org", cwd=r"C:\Users\dora\x"
    )
    trace = write_trace(
        tmp_path / "t.json",
        said,
        event("x", 1, 1, f="/tmp/torchinductor_erin/a.py"),
        host_name="h9.acme",
    )
    assert {"bob", "gpu-3", "carol", "carol@acme.org", "dora", "erin", "h9", "h9.acme"} <= names_of(
        trace
    )
    assert Redaction(["root", "", "12", "ab"]).text("root of 12 ab") == "root of 12 ab"


def figures(document: dict, of_file: str):
    """Without what tells which file it is of."""
    text = json.dumps(document | {"trace": ""}).replace(of_file, "")
    return json.loads(re.sub(r'"(group|group_description)": "[^"]*"', '"group": ""', text))


def same_analysis(path, folder):
    mailed = folder / "mailed.json.gz"
    write_slim(path, mailed, None, {}, redact=True)
    (first,), (second,) = (analyze_all([one])[0] for one in (path, mailed))
    first, second = (figures(document, name.name) for name, document in (first, second))
    first["integrity"] |= {
        "stacks_recorded": second["integrity"]["stacks_recorded"]
    }  # slim: frames are left out
    assert first == second


REAL = (
    "b200_eager b300_moe graph_replay_lagging_gpu mi250_trailing_step"
    " mi300_attention_far_below_roof".split()
)
REAL += "mi300_sglang_decode rocm_external_id_only start_up_simple_add".split()
LARGE = "flux_compiled mi300_resnet_training_rank0 nanogpt_trailing_step".split()


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "name",
    [
        *(f"{name}.json.gz" for name in REAL), H100,
        *(pytest.param(f"{name}.json.gz", marks=pytest.mark.slow) for name in LARGE),
        pytest.param(TORCH_1_8, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_real_trace_without_names_is_analyzed_alike(tmp_path, name):
    same_analysis(real_path(name), tmp_path)


@pytest.mark.slow
def test_a_run_without_names_is_analyzed_alike(tmp_path, train):
    flags = [
        *SMALL_MODEL,
        "--num-steps",
        "8",
        "--profile-stacks",
        "--warmup-steps",
        "2",
        "--profile-dir",
        "run",
    ]
    assert train(*flags, small=False)[0] == 0
    (trace,) = (tmp_path / "run").glob("trace_step_*")
    alone = trace.rename(tmp_path / trace.name)  # without what the run tells beside it
    same_analysis(alone, tmp_path)
    assert str(tmp_path) not in (tmp_path / "mailed.json.gz").read_bytes().decode(errors="replace")


def test_redact_is_of_a_slim_trace(tmp_path, profiler):
    write_trace(tmp_path / "trace.json", *SMALL)
    for flags in (["--analyze-existing", "trace.json", "--redact"], ["--redact"]):
        code, out = profiler(*flags)
        assert (code, out.count("\n")) == (2, 1) and "--redact: requires --" in out, out
