"""--workload FILE.py[:NAME]: a training step that knows nothing of this project, measured,
predicted and explained; and what is wrong with a file, in one line with its number."""

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conforming import mismatches
from helpers import PROJECT, documents, finish, start
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from traces import answers_in

import run_pytorch_profiler
import run_study
import tiny_llama_v1 as tiny_llama
from analysis.commands.flops_command import by_module
from analysis.memory.predicted import peak_bytes, predicted_memory
from analysis.prediction.document import Prediction, predict
from analysis.prediction.text import prediction_lines
from analysis.work.flop_counts import flops_of_step
from harness.base.errors import UserError
from harness.base.layer_names import folded_names, part_of, starred
from harness.instruments.audit import norms_by_part
from harness.instruments.compilation import Compilation
from harness.instruments.memory_timeline import StepMemory
from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.timing import NullMeter
from harness.model.user_code.batches import hides_tokens
from harness.model.user_code.fake_user_code import on_fake_tensors
from harness.model.user_code.user_file import UserFile
from harness.model.user_code.user_workload import IN_THE_FILE, USED, UserWorkload, examined
from studies.engine import command_line
from studies.optimization_parts.ladder import NAMES, names_for

CPU = torch.device("cpu")
FILE = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return x + self.conv(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(1, 4, 1), nn.ModuleList([Block(), Block()]), nn.Linear(256, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1))


def made():
    model = Net()
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def drawn():
    while True:
        yield torch.randn(4, 1, 8, 8), torch.randint(5, (4,))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def workload():
    return *made(), drawn(), loss


def with_loader():
    return *made(), DataLoader(TensorDataset(torch.randn(12, 1, 8, 8), torch.randint(5, (12,))), 4, shuffle=True), loss


def with_step():
    def step(model, optimizer, batch):
        loss(model, batch).backward()
        optimizer.step()

    return *made(), drawn(), step


def with_unused():
    model = Net()
    model.unused, model.stem.weight.requires_grad = nn.Linear(9, 9), False
    return model, torch.optim.AdamW(model.parameters()), drawn(), loss


def in_bfloat16():
    model = Net().to(torch.bfloat16)
    return model, torch.optim.AdamW(model.parameters()), drawn(), lambda model, batch: loss(model, (batch[0].bfloat16(), batch[1]))


def without_blocks():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 5))
    return model, torch.optim.SGD(model.parameters(), 0.1), drawn(), loss


def three():
    return *made(), drawn()


def no_model():
    return 1, made()[1], drawn(), loss


def other_optimizer():
    return Net(), made()[1], drawn(), loss


def other_loss():
    return *made(), drawn(), lambda model: 0


def needs(size):
    return workload()


def vector():
    return *made(), drawn(), lambda model, batch: model(batch[0]).mean(1)


def no_loss():
    return *made(), drawn(), lambda model, batch: None


def detached():
    return *made(), drawn(), lambda model, batch: loss(model, batch).detach()


def wrong():
    return *made(), drawn(), lambda model, batch: batch[2]


def on_gpu():
    return Net().cuda(), made()[1], drawn(), loss


def on_meta():
    with torch.device("meta"):
        return workload()


def changes():
    return *made(), iter([(torch.randn(n, 1, 8, 8), torch.randint(5, (n,))) for n in (4, 4, 3)]), loss


def ends():
    return *made(), iter([next(drawn())]), loss


def empty():
    return *made(), [], loss


def words():
    return *made(), ["a word"], loss
"""  # noqa: E501


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("workload") / "net.py"
    path.write_text(FILE)
    return path


def workload_of(file: Path, name: str = "workload", *flags: str) -> UserWorkload:
    arguments = ["--workload", f"{file}:{name}", *flags]
    return tiny_llama.resolve(tiny_llama.build_parser().parse_args(arguments))[0]


def second_step(workload: UserWorkload) -> StepMemory:
    state = workload.build(CPU)
    stream = workload.batches(CPU)
    workload.train(state, stream, 1, NullMeter(), NullMeter())
    tracker = MemoryTracker(state.model, state.optimizer)
    workload.train(state, stream, 1, NullMeter(), NullMeter(tracker))
    assert not any(
        module._forward_pre_hooks or module._forward_hooks for module in state.model.modules()
    )
    return tracker.timeline


GPT2 = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def batches(masks):
    while True:
        tokens = torch.randint(64, (3, 48))
        mask = torch.ones_like(tokens)
        mask[0, 40:] = masks != "padded"
        batch = {"input_ids": tokens, "labels": tokens, "attention_mask": mask}
        yield {name: batch[name] for name in batch if masks or name != "attention_mask"}


def loss(model, batch):
    return model(**batch, use_cache=False).loss


def workload(masks=""):
    shape = {"n_positions": 48, "n_embd": 32, "n_layer": 1, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **shape))
    return model, torch.optim.AdamW(model.parameters()), batches(masks), loss


def whole():
    return workload("whole")


def padded():
    return workload("padded")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["workload", "whole", "padded"])
def test_masks_of_a_library_are_those_of_a_real_step(tmp_path, name):
    """transformers looks whether a mask hides anything, which it cannot in fake tensors."""
    (tmp_path / "gpt2.py").write_text(GPT2)
    workload = workload_of(tmp_path / "gpt2.py", name)
    assert workload.hides_tokens == (name == "padded")
    measured, predicted = (
        second_step(workload).document(),
        predicted_memory(workload, False).document(),
    )
    assert predicted["peak_bytes"] == measured["peak_bytes"]
    assert predicted["kept_for_backward"] == measured["kept_for_backward"]


def test_whether_a_batch_hides_tokens():
    ones, tokens = torch.ones(2, 8, dtype=torch.int64), torch.arange(16).reshape(2, 8)
    some = ones.clone()
    some[0, 5:] = 0
    for batch in (
        (tokens, ones),
        tokens,
        {"input_ids": tokens, "attention_mask": ones},
        {"token_type_ids": some},
    ):
        assert not hides_tokens(batch)
    for batch in (
        (tokens, some.bool()),
        {"attention_mask": some},
        {"input_ids": tokens, "position_ids": tokens},
    ):
        assert hides_tokens(batch)


# ---- What is found by itself ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["workload", "with_loader", "with_unused", "in_bfloat16"])
def test_the_predicted_peak_is_that_of_a_real_step(file, name):
    workload = workload_of(file, name)
    measured, predicted = (
        second_step(workload).document(),
        predicted_memory(workload, False).document(),
    )
    assert predicted["peak_bytes"] == measured["peak_bytes"]
    assert predicted["peak"]["bytes_by_category"] == measured["peak"]["bytes_by_category"]
    kept = {(row["component"], row["layer"]) for row in measured["kept_for_backward"]}
    assert {("stem", None), ("blocks.*.norm", 0), ("blocks.*.norm", 1), ("loss", None)} <= kept
    assert [row["name"] for row in measured["phases"]] == [
        "data",
        "forward",
        "backward",
        "optimizer",
    ]
    assert workload.precision == ("bf16" if name == "in_bfloat16" else "fp32")


@pytest.mark.parametrize("name", ["workload", "with_unused", "in_bfloat16"])
def test_the_memory_of_clipping_is_predicted(file, name):
    workload = workload_of(file, name, "--grad-clip", "0.1")
    measured, predicted = (
        second_step(workload).document(),
        predicted_memory(workload, False).document(),
    )
    assert [row["peak_bytes"] for row in predicted["phases"]] == [
        row["peak_bytes"] for row in measured["phases"]
    ]
    assert predicted["allocations"] == measured["allocations"]


def test_gradients_are_clipped_from_outside(file):
    losses, norms = [], []
    for flags in (("--grad-clip", "1"), ()):
        workload, meter = workload_of(file, "workload", *flags), NullMeter()
        torch.manual_seed(0)
        workload.train(workload.build(CPU), workload.batches(CPU), 4, meter, NullMeter())
        losses.append([loss.item() for loss in meter.losses])
        norms += meter.grad_norms
    assert len(norms) == 4 and max(norms) > 1
    assert losses[0][0] == losses[1][0] and losses[0] != losses[1]


def test_flops_are_counted(file):
    images, kernel = 4, 9
    blocks = 2 * (2 * images * 64 * 4 * 4 * kernel)
    forward = 2 * images * 64 * 4 + blocks + 2 * images * 256 * 5
    of_images = 2 * images * 64 * 4  # which need no gradient
    assert flops_of_step(workload_of(file, "workload")) == (forward, 3 * forward - of_images)


def test_checkpointing_and_the_optimizers_implementation_from_outside(file):
    """The same losses, the predicted peak to the byte, recomputation apart from the work of the
    step."""
    plain, losses, peaks = workload_of(file, "workload"), [], []
    for flags in ([], ["--activation-checkpointing"], ["--optimizer-impl", "foreach"]):
        workload, meter = workload_of(file, "workload", *flags), NullMeter()
        torch.manual_seed(0)
        state = workload.build(CPU)
        workload.train(state, workload.batches(CPU), 3, meter, NullMeter())
        losses.append([loss.item() for loss in meter.losses])
        peaks.append(second_step(workload).document()["peak_bytes"])
        assert peaks[-1] == peak_bytes(workload, False)
        assert workload.step_flops() == plain.step_flops()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(
        losses[0], rel=1e-5
    )
    assert peaks[1] < peaks[0]
    # Of each block all but its last operator, which no gradient needs: here the convolution, whose
    # output is added.
    assert workload_of(file, "workload", "--activation-checkpointing").recomputed_flops() == 0
    assert optimization_rungs(plain) == ["fused-optimizer", "compile", "checkpointing", "bf16"]
    assert optimization_rungs(workload_of(file, "without_blocks")) == [
        "fused-optimizer",
        "compile",
        "bf16",
    ]


def optimization_rungs(workload: UserWorkload) -> list[str]:
    return names_for(workload, NAMES)


@pytest.mark.slow
def test_the_largest_batch_that_fits_is_predicted_and_the_length_is_the_files(file):
    workload = workload_of(file)
    document = predict(workload, CPU, peak=0.5, device_memory=2**30).as_json()
    assert not mismatches(
        json.loads(json.dumps(document)) | {"schema_version": 3}, documents.Prediction, "prediction"
    )
    assert document["max_seq_len"] is None and document["max_seq_len_reason"]
    eight, nine = (peak_bytes(workload.with_settings(batch_size=n), False) for n in (8, 9))
    sixteen = peak_bytes(workload.with_settings(batch_size=16), False)
    assert 0 < nine - eight == (sixteen - eight) / 8
    assert "Longest sequence" not in "\n".join(prediction_lines(answers_in(document, Prediction)))


def test_repeated_blocks_are_folded():
    blocks = [f"model.h.{n}{part}" for n in range(12) for part in ("", ".attn", ".mlp.0", ".mlp.1")]
    found = folded_names(
        [*blocks, "layers.3.attention.scores", "net.0", "net.1", "net.1.conv", "head"]
    )
    assert found["model.h.7"] == "12 x model.h.*"
    assert found["model.h.11.attn"] == "12 x model.h.*.attn"
    assert found["model.h.11.mlp.1"] == "12 x model.h.*.mlp.1"
    assert found["layers.3.attention.scores"] == "attention.scores"
    assert [found[name] for name in ("net.0", "net.1.conv", "head")] == [
        "net.0",
        "net.1.conv",
        "head",
    ]
    assert part_of("model.h.3.attn") == (3, "model.h.*.attn")
    assert part_of("layers.3.attention.scores") == (3, "attention.scores")
    assert [starred(name) for name in ("model.h.3.mlp.1", "model.h.3")] == [
        "model.h.*.mlp.1",
        "model.h.3",
    ]
    assert starred("model.h.3", whole_layers=True) == "model.h.*"
    # Of models of any names: over all layers.
    norms = {f"model.layers.{i}.mlp.weight": 3.0 + i for i in range(2)} | {"head.weight": 1.0}
    assert norms_by_part(norms) == {"model.layers.*.mlp": 5.0, "head": 1.0}


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.keys = nn.Linear(4, 4)  # [B, S, D] -> [B, S, D]

    def forward(self, x):
        return (x @ self.keys(x).transpose(1, 2)) @ x  # [B, S, S] @ [B, S, D]


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.h, self.tail = nn.ModuleList([Scores(), Scores()]), nn.Linear(4, 4)

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.tail(x) @ torch.ones(4, 4)


def test_flops_by_module_add_up_to_those_of_the_forward_pass():
    """S = 3, D = 4, one sample: a linear layer and x @ ones have 2*S*D*D = 96 FLOPs, the scores
    twice 2*S*S*D = 72."""
    model = nn.ModuleDict({"body": Body()})
    with FlopCounterMode(display=False) as counter:
        model["body"](torch.ones(1, 3, 4))
    counts = {
        name: sum(one.values()) for name, one in counter.get_flop_counts().items()
    }  # "Global" for all
    by_name = {
        name.replace("Body", "body"): counts[name] for name in counts if name.startswith("Body")
    }
    assert (counts["Global"], by_name["body"], by_name["body.h.0"], by_name["body.tail"]) == (
        672,
        672,
        96 + 144,
        96,
    )
    counted = {"counter": "FlopCounterMode", "forward_flops": 700}  # 28 in a function
    rows = by_module({"forward_flops_by_module": by_name, "rows": [counted]})
    assert {row["component"]: round(700 * row["share"]) for row in rows} == {
        "2 x body.h.*": 288, "2 x body.h.*.keys": 192, "body": 96, "body.tail": 96,
        "the model itself": 28,
    }  # fmt: skip


def test_a_module_of_fake_tensors_can_be_converted():
    with FakeTensorMode(), on_fake_tensors():
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8))
        model[1].weight = model[0].weight
        model.to("cuda" if torch.cuda.is_available() else "cpu").half()
    assert model[1].weight is model[0].weight and model[1].weight.requires_grad
    assert {x.dtype for x in (*model.parameters(), model[2].running_mean)} == {torch.float16}


def test_compiling_changes_neither_batches_nor_random_numbers(file, train, tmp_path, traced_graphs):
    losses = []
    for name, flags in (("eager", ()), ("compiled", ("--compile",))):
        code, _, err = train("--workload", str(file), "--output-dir", name, *flags, small=False)
        assert code == 0, err
        losses.append(
            json.loads((tmp_path / name / "performance_summary.json").read_text())["steps"]["loss"]
        )
    assert losses[0] == losses[1]


def test_compiling_changes_no_average_of_a_norm(file, traced_graphs):
    workload = workload_of(file)
    state = workload.build(CPU)
    before = [buffer.clone() for buffer in state.model.buffers()]
    Compilation(workload, state, next(workload.batches(CPU)), CPU)
    torch.testing.assert_close([*state.model.buffers()], before, rtol=0, atol=0)
    assert before


def test_parts_are_named_in_observed_steps_alone(file):
    workload, seen = workload_of(file), []

    class Watch:
        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

    state, stream = workload.build(CPU), workload.batches(CPU)
    for module in state.model.modules():
        module.register_forward_hook(
            lambda module, *call: seen.append(len(module._forward_pre_hooks))
        )
    workload.train(state, stream, 1, NullMeter(), NullMeter())
    assert set(seen) == {0}
    seen.clear()
    workload.train(state, stream, 1, NullMeter(), NullMeter(Watch()))
    assert set(seen) == {1}


# ---- What is wrong with a file -------------------------------------------------------------------


def line_of(text: str) -> int:
    return FILE.splitlines().index(text) + 1


WRONG = {
    "three": (
        "def three():",
        r"three\(\) returned a tuple of 3; expected \(model, optimizer, batches, loss\)",
    ),
    "no_model": ("def no_model():", "returned an int as model; expected an nn.Module"),
    "other_optimizer": ("def other_optimizer():", "none of the model's parameters"),
    "other_loss": (
        "    return *made(), drawn(), lambda model: 0",
        r"takes 1 argument; expected a loss\(model, batch\)",
    ),
    "with_step": (
        "    def step(model, optimizer, batch):",
        r"takes 3 arguments; .*profile_program.py -- its program",
    ),
    "needs": (
        "def needs(size):",
        r"needs\(\) needs the argument size; expected a function that can be called without",
    ),
    "vector": (
        "    return *made(), drawn(), lambda model, batch: model(batch[0]).mean(1)",
        r"the loss is a tensor of shape \[4\]; expected a scalar tensor",
    ),
    "no_loss": (
        "    return *made(), drawn(), lambda model, batch: None",
        "the loss is None; expected a scalar tensor",
    ),
    "detached": (
        "    return *made(), drawn(), lambda model, batch: loss(model, batch).detach()",
        "no gradient; expected",
    ),
    "wrong": (
        "    return *made(), drawn(), lambda model, batch: batch[2]",
        "IndexError: tuple index out of range",
    ),
    "on_gpu": ("    return Net().cuda(), made()[1], drawn(), loss", r"leave out .cuda\(\)"),
    "on_meta": ("def on_meta():", "the model is on meta, and this run is on cpu"),
    "changes": (
        "def changes():",
        r"batch 3 is \[3, 1, 8, 8\] float32, \[3\] int64, the first was \[4, 1, 8, 8\]",
    ),
    "ends": ("def ends():", "batches ended before the last step; expected a DataLoader"),
    "empty": ("def empty():", "there is no batch; expected a DataLoader"),
    "words": ("def words():", "a batch is str without tensors; expected a tensor"),
    "absent": (FILE.splitlines()[0], r"there is no function absent\(\) at the top level"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_file_and_line(file, name):
    line, text = WRONG[name]
    if name == "on_gpu" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=rf"^net\.py:{line_of(line)}: .*{text}") as error:
        workload = workload_of(file, name)
        workload.train(workload.build(CPU), workload.batches(CPU), 3, NullMeter(), NullMeter())
    assert "\n" not in str(error.value)
    assert ("Traceback" in error.value.shown) == (name == "wrong")
    assert name != "wrong" or "batch[2]" in error.value.shown


def test_an_error_of_a_gpu_is_not_for_want_of_one(file, monkeypatch):
    error = RuntimeError("CUDA error: device-side assert triggered")
    for available in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)  # noqa: B023
        with pytest.raises(UserError) as found, UserFile.of(str(file)).users_code():
            raise error
        assert ("this run is on a CPU" in str(found.value)) != available


SOURCES = {
    "def workload(:\n": (1, "SyntaxError", ""),
    "import nothing_of_this_name\ndef workload(): pass\n": (
        1, "No module named 'nothing_of_this_name'", "",
    ),
    "x = 1\ny = x / 0\ndef workload(): pass\n": (
        2, "ZeroDivisionError: division by zero", "y = x / 0",
    ),
    "workload = 3\n": (1, "workload is not a function", ""),
    "def train():\n    pass\n": (1, "it has train: use --workload", ""),
    "def main():\n    loss.backward()\nif __name__ == '__main__':\n    main()\n": (
        2, "it trains by itself", "",
    ),
    "for x in data:\n    f(x).backward()\n": (
        2, "it trains by itself, .*profile_program.py -- program.py", "",
    ),
    "import transformers\nt = transformers.Trainer(m)\nt.train()\n": (
        2, "it trains by itself", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_a_file_that_is_no_workload_is_not_run(tmp_path, source):
    """But imported, where it has the function."""
    line, text, shown = SOURCES[source]
    (tmp_path / "program.py").write_text(source)
    with pytest.raises(UserError, match=rf"^program\.py:{line}: .*{text}") as error:
        UserFile.of(str(tmp_path / "program.py")).make()
    assert shown in error.value.shown


def test_a_file_that_is_none(tmp_path, train):
    for value in ("nothing.py", str(tmp_path), f"{tmp_path}:workload"):
        code, out, err = train("--workload", value, small=False)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"--workload {value.removesuffix(':workload')}: there is no such file" in err


def test_every_flag_is_used_or_refused():
    """Each flag of the script means the same for a file's step, or is refused."""
    parser = tiny_llama.build_parser()
    groups = {"model", "training", "optimizations", "several ranks"}
    training = {
        a.dest
        for group in parser._action_groups
        if group.title in groups
        for a in group._group_actions
    }
    assert training >= {"hidden_dim", "batch_size", "compile", "parallel"}
    refused = {name for names in IN_THE_FILE.values() for name in names}
    assert training <= refused | set(USED)
    assert not refused & set(USED)


def test_flags_without_effect_are_refused(file, train, command, monkeypatch):
    for flag in ("--size", "tiny"), ("--seq-len", "8"), ("--learning-rate", "1"), ("--fused-norm",):
        code, out, err = train("--workload", str(file), *flag, small=False)
        assert (code, out) == (2, "") and f"{flag[0]}: has no effect with --workload" in err
    code, _, err = train(
        "--workload", f"{file}:without_blocks", "--activation-checkpointing", small=False
    )
    assert code == 2 and "no repeated blocks" in err
    monkeypatch.setattr(
        command_line, "run_in_subprocess_if_gpu", None
    )  # before a process looks at the GPU
    for study, flag in (("memory", "--seq-lens"), ("training", "--batch-size")):
        code, out, err = command(run_study, study, "--workload", str(file), flag, "8")
        assert (code, out) == (2, "") and f"{flag}: has no effect with --workload" in err


# ---- Commands ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_profiled_run(file, command):
    """Documents as declared, components that add up to the step and name the modules, opportunities
    without flags that the file has no use for."""
    flags = ["--workload", str(file), "--num-steps", "9", "--include-memory", "--peak", "1"]
    code, out, err = command(run_pytorch_profiler, *flags, "--profile-dir", "run")
    assert code == 0, err
    assert "Net of net.py" in out and "off by +0.00%" in out and "Audit: ok" in out
    kinds = {
        "config": "RunConfig",
        "performance_summary": "PerformanceSummary",
        "operator_analysis": "OperatorAnalysis",
    }
    found = {}
    for name, kind in (kinds | {"memory_timeline": "MemoryTimeline"}).items():
        found[name] = json.loads(Path(f"run/{name}.json").read_text())
        assert not mismatches(found[name], getattr(documents, kind), name)
    analysis, steps = found["operator_analysis"], found["performance_summary"]["performance"]
    parameters = sum(p.numel() for p in UserFile(file, "workload").make().model.parameters())
    about = {
        "file": os.path.relpath(file),
        "function": "workload",
        "model": "Net",
        "parameters": parameters,
    }
    assert found["config"]["model"].items() >= about.items()
    assert analysis["attribution"]["source"] == "named ranges"
    names = {row["component"] for row in analysis["components"]}
    assert {
        "stem",
        "2 x blocks.*.norm",
        "2 x blocks.*.conv",
        "2 x blocks.*",
        "head",
        "loss",
        "optimizer",
    } <= names
    total = sum(row["ms_per_step"] for row in analysis["components"])
    assert total == pytest.approx(analysis["attribution"]["ms_per_step"])
    flags = {
        None,
        "--compile",
        "--optimizer-impl fused",
        "--activation-checkpointing",
        "--precision bf16",
    }
    assert {row["flag"] for row in analysis["opportunities"]} <= flags
    assert (
        steps["model_flops_per_step"]
        and steps["avg_backward_time_ms"]
        and steps["avg_optimizer_time_ms"]
    )


@pytest.mark.slow
def test_sweeps_have_a_row_for_the_file(file, command):
    flags = ["--workload", str(file), "--dry-run"]
    for study in ("memory", "training"):
        code, _, err = command(run_study, study, *flags, "--output-dir", study)
        assert code == 0, err
    rows = json.loads(Path("memory/memory_study.json").read_text())["rows"]
    assert [(row["batch_size"], row["seq_len"]) for row in rows] == [(4, 1)]
    assert rows[0]["predicted_bytes"] == peak_bytes(workload_of(file), False)
    rows = json.loads(Path("training/training_benchmark.json").read_text())["rows"]
    assert {(row["size"], row["mode"]) for row in rows} == {
        ("net.py", "forward"),
        ("net.py", "train"),
    }


@pytest.mark.slow
def test_a_file_on_a_pretended_gpu(file, tmp_path):
    """Where losses are copied to the host while the device computes, and model and batches have to
    be moved."""
    environment = {
        "PRETEND_GPU": "mi300x",
        "PYTHONPATH": f"{PROJECT / 'tests' / 'pretend_gpu'}:{PROJECT}",
    }
    flags = ["--workload", str(file), "--num-steps", "4", "--profile-memory", "--output-dir", "run"]
    code, out = finish(
        start(
            sys.executable, str(PROJECT / "tiny_llama_v1.py"), *flags, cwd=tmp_path, env=environment
        )
    )
    assert code == 0, out
    memory = json.loads((tmp_path / "run" / "memory_timeline.json").read_text())
    assert memory["predicted"]["peak_bytes"] == memory["peak_bytes"]
    assert [row["name"] for row in memory["phases"]] == ["data", "forward", "backward", "optimizer"]


LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def made(hidden, layers, heads):
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, vocab_size=100,
        max_position_embeddings=32, attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)

    def batches():
        while True:
            tokens = torch.randint(100, (2, 16))
            yield {"input_ids": tokens, "labels": tokens}

    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, batches(), lambda model, batch: model(**batch).loss


"""


@pytest.mark.slow
def test_a_model_that_nobody_here_wrote(tmp_path):
    """transformers' LLaMA by config, at two sizes: the peak to the byte, FLOPs by the formula of
    ours."""
    pytest.importorskip("transformers")
    sizes = {"small": (32, 2, 4), "large": (64, 3, 8)}
    made = [f"def {name}():\n    return made{size}\n" for name, size in sizes.items()]
    (tmp_path / "llama.py").write_text(textwrap.dedent(LLAMA) + "\n\n".join(made))
    checkpointed = workload_of(tmp_path / "llama.py", "small", "--activation-checkpointing")
    assert 0 < checkpointed.recomputed_flops() < checkpointed.forward_flops()
    for name, (hidden, layers, heads) in sizes.items():
        workload = workload_of(tmp_path / "llama.py", name)
        assert (workload.batch_size, workload.seq_len) == (2, 16)
        assert (
            predicted_memory(workload, False).document()["peak_bytes"]
            == second_step(workload).document()["peak_bytes"]
        )
        ours = tiny_llama.TinyLlamaConfig(
            vocab_size=100,
            hidden_dim=hidden,
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=heads // 2,
            intermediate_dim=2 * hidden,
        )
        assert examined(workload.file).parameters == ours.parameter_count()
        assert workload.forward_flops() == sum(ours.forward_flops_by_component(2, 16).values())


NARROW = """
import torch


def workload():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).bfloat16()

    def batches():
        while True:
            yield torch.randn(4, 8).bfloat16()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, batches(), lambda net, x: net(x).float().mean()
"""


@pytest.fixture
def narrow(scratch) -> Path:
    """A file whose parameters are bf16."""
    (scratch / "narrow.py").write_text(NARROW)
    return scratch / "narrow.py"


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_a_precision_that_the_parameters_do_not_have_is_refused(narrow, train, precision):
    code, out, err = train(
        "--workload", "narrow.py", "--precision", precision, "--device", "cpu", small=False
    )
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (
        f"--precision {precision}: has no effect with --workload: the parameters are bf16 in the"
        " file" in err
    )
    assert workload_of(narrow).precision == "bf16"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--rungs sdpa",
            (
                "--rungs sdpa: --attention sdpa has no effect with --workload: the file has a model"
                " of its"
            ),
        ),
        (
            "--rungs compile checkpointing",
            "--rungs checkpointing: --activation-checkpointing: its model has no",
        ),
        (
            "--rungs bf16",
            "--rungs bf16: --precision bf16 is the precision of the baseline; leave it out",
        ),
        ("--reference", "--reference: has no effect with --workload"),
        (
            "--precisions fp32",
            "--precision fp32: has no effect with --workload: the parameters are bf16",
        ),
    ],
)
def test_what_an_optimization_study_of_a_file_cannot_have_is_refused(narrow, command, flags, words):
    given = [
        "--workload",
        "narrow.py",
        *flags.split(),
        "--dry-run",
        "--device",
        "cpu",
        "--output-dir",
        "study",
    ]
    code, out, err = command(run_study, "optimization", *given)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert not Path("study").exists()


@pytest.mark.slow
def test_rows_of_a_file_have_its_precision(narrow, command):
    given = ["--workload", "narrow.py", "--dry-run", "--device", "cpu", "--output-dir"]
    for study, name in (("optimization", "optimization_study"), ("training", "training_benchmark")):
        assert command(run_study, study, *given, name)[0] == 0
        rows = json.loads(Path(name, f"{name}.json").read_text())["rows"]
        assert {row["precision"] for row in rows} == {"bf16"}
