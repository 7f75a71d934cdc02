"""Programs of two ranks, right and wrong: what the audit says of ranks that have to train one
model."""

import copy
import importlib.util
import json
import os
import sys
from pathlib import Path

import programs
import pytest
from helpers import PROJECT, finish, made_once, start

from analysis.commands.profiled_program import audit_of
from harness.instruments.audit import Audit, AuditFinding, audit_text
from harness.program.command import run
from harness.program.ranks import RankComparison, broadcasts_found, step_ms_of
from harness.run.measurements import add_ranks

# Each shape is a pair of processes, and one pair is forked after the other: torch is imported once.
# train(): steps of ACCUMULATED micro-steps.
START = """
import contextlib, os, sys
from pathlib import Path
import torch
import torch._dynamo  # as optimizers do: once, before the forks
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.optim
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, ACCUMULATED = 9, 2


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    torch.manual_seed(100 + dist.get_rank() if dist.is_initialized() else os.getpid())
    return model


def batch():
    return torch.randn(8, 8), torch.randint(4, (8,))


def train(model, reduces=None, batch=batch, around_backward=None, after=None, optimizer=None):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=0.01)
    for step in range(STEPS):
        for micro_step in range(ACCUMULATED):
            is_last = micro_step == ACCUMULATED - 1
            syncs = reduces is None or reduces(micro_step, is_last)
            with contextlib.nullcontext() if syncs else model.no_sync():
                x, y = batch()
                loss = cross_entropy(model(x), y)
                is_late = around_backward and not is_last
                with model.no_sync() if is_late else contextlib.nullcontext():
                    loss.backward()
        if after:
            after(model, step)
        optimizer.step()
        optimizer.zero_grad()


def average(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def gradients(model):
    return [p.grad for p in model.parameters()]

"""
SHAPES = {
    "off by one": "train(DDP(make()), lambda micro_step, is_last: micro_step == 0)",
    "accumulates": "train(DDP(make()), lambda micro_step, is_last: is_last)",
    "around the backward pass": "train(DDP(make()), around_backward=True)",
    "same seed": """
        model = DDP(make())
        torch.manual_seed(5)
        train(model, lambda micro_step, is_last: is_last)
        """,
    "same dropout": """
        model = DDP(nn.Sequential(make(), nn.Dropout(0.1)))
        own = torch.Generator().manual_seed(dist.get_rank())
        torch.manual_seed(5)


        def batch():
            x, y = torch.randn(8, 8, generator=own), torch.randint(4, (8,), generator=own)
            return x, y


        train(model, lambda micro_step, is_last: is_last, batch=batch)
        """,
    "epochs": """
        data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randint(4, (16,)))
        sampler = torch.utils.data.DistributedSampler(data)
        loader = torch.utils.data.DataLoader(data, 4, sampler=sampler)


        def batches():
            for epoch in range(STEPS):
                yield from loader


        batches = batches()
        train(DDP(make()), lambda micro_step, is_last: is_last, batch=lambda: next(batches))
        """,
    "constant batches": """
        model, constant = DDP(make()), (torch.ones(8, 8), torch.zeros(8, dtype=torch.long))
        train(model, lambda micro_step, is_last: is_last, batch=lambda: constant)
        """,
    "by hand": "train(make(), after=lambda model, step: average(gradients(model)))",
    "by hand, row by row": """
        def rows(model):
            return [row for p in model.parameters() for row in p.grad]


        train(make(), after=lambda model, step: average(rows(model)))
        """,
    "by hand, at first": """
        def reduce(model, step):
            if step < 2:
                average(gradients(model))


        train(make(), after=reduce)
        """,
    "local SGD": """
        def reduce(model, step):
            if step % 4 == 3:
                average([p.data for p in model.parameters()])


        train(make(), after=reduce)
        """,
    "local SGD of DDP": "train(DDP(make()), lambda micro_step, is_last: False)",
    "ZeRO": """
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = DDP(make())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        train(model, lambda micro_step, is_last: is_last, optimizer=optimizer)
        """,
    "frozen": """
        model = make()
        model[0].requires_grad_(False)
        train(DDP(model), lambda micro_step, is_last: is_last)
        """,
    "compressed": """
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model = DDP(make())
        model.register_comm_hook(None, fp16_compress_hook)
        train(model, lambda micro_step, is_last: is_last)
        """,
    "FSDP2": """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        train(fully_shard(make(), mesh=init_device_mesh("cpu", (2,))))
        """,
    "replicas of FSDP2": """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
        train(fully_shard(make(), mesh=mesh))
        """,
    "replicas with a rate each": """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
        model = fully_shard(make(), mesh=mesh)
        train(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank())))
        """,
    "two models": """
        generator, critic = DDP(make()), DDP(make())
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (critic, generator)]
        for step in range(STEPS):
            x, y = batch()
            (critic(x) - generator(x).detach()).square().mean().backward()
            optimizers[0].step()
            cross_entropy(generator(x), y).backward()
            optimizers[1].step()
            generator.zero_grad()
            critic.zero_grad()
        """,
    "scaler that skips": """
        model = DDP(make())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        for step in range(STEPS):
            x, y = batch()
            with torch.autocast("cpu", torch.float16):
                loss = cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
    "saves itself": """
        class WithMore(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = make()

            def forward(self, x, *more):
                return self.model(x)


        model = DDP(WithMore())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            x, y = batch()
            with torch.inference_mode():
                constant = torch.ones(2)
            cross_entropy(model(x, constant, torch.ones(0)), y).backward()
            torch.save(model, f"model_of_rank{dist.get_rank()}.pt")
            optimizer.step()
            optimizer.zero_grad()
        """,
    "buffers": """
        class WithMask(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = make()
                self.register_buffer("mask", torch.ones(512, 1024))

            def forward(self, x):
                return self.model(x)


        train(DDP(WithMask()), lambda micro_step, is_last: is_last)
        """,
    "checkpointed": """
        from torch.utils.checkpoint import checkpoint


        class Checkpointed(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = make(), nn.Linear(4, 4)

            def forward(self, x):
                with torch.no_grad():  # no fault of theirs
                    checkpoint(self.first, x, use_reentrant=True)
                return self.last(checkpoint(self.first, x, use_reentrant=True))


        model = DDP(Checkpointed(), find_unused_parameters=True)
        train(model, lambda micro_step, is_last: is_last)
        """,
    "ZeRO, off by one": """
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = DDP(make())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        train(model, lambda micro_step, is_last: micro_step == 0, optimizer=optimizer)
        """,
    "around DDP": """
        class Inner(nn.Module):
            def __init__(self, model):
                super().__init__()
                self.wrapped = DDP(model)

            def forward(self, x):
                return self.wrapped.module(x)


        train(Inner(make()))
        """,
    "FSDP2 that reduces once": """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(make(), mesh=init_device_mesh("cpu", (2,)))


        def batch_of_last():
            batch_of_last.calls += 1
            model.set_requires_gradient_sync(batch_of_last.calls % ACCUMULATED == 0)
            return batch()


        batch_of_last.calls = 0
        train(model, batch=batch_of_last)
        """,
    "LoRA": """
        class LoRA(nn.Module):
            def __init__(self, linear):
                super().__init__()
                self.linear = linear.requires_grad_(False)
                self.down = nn.Linear(linear.in_features, 2, bias=False)
                self.up = nn.Linear(2, linear.out_features, bias=False)
                nn.init.zeros_(self.up.weight)

            def forward(self, x):
                return self.linear(x) + self.up(self.down(x))


        model = make()
        torch.manual_seed(0)
        model[0], model[2] = LoRA(model[0]), LoRA(model[2])
        torch.manual_seed(100 + dist.get_rank())
        train(DDP(model), lambda micro_step, is_last: is_last)
        """,
    "frozen BatchNorm": """
        class Frozen(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
                self.norm = nn.BatchNorm1d(16).requires_grad_(False)
                self.train()

            def train(self, mode=True):
                super().train(mode)
                self.norm.eval()
                return self

            def forward(self, x):
                return self.last(self.norm(self.first(x)).relu())


        torch.manual_seed(0)
        model = Frozen()
        torch.manual_seed(100 + dist.get_rank())
        train(DDP(model), lambda micro_step, is_last: is_last)
        """,
    "warm-up from 0": """
        model = DDP(make())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 5))
        for step in range(STEPS):
            x, y = batch()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            warm_up.step()
        """,
    "within a closure": """
        model = DDP(make())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


        def backward():
            x, y = batch()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss


        for step in range(STEPS):
            with model.no_sync():
                backward()
            optimizer.step(backward)
            optimizer.zero_grad()
        """,
    "uneven inputs": """
        from torch.distributed.algorithms.join import Join

        model = DDP(make())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with Join([model]):
            for step in range(STEPS + 2 * dist.get_rank()):
                x, y = batch()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        """,
    "off by one on four": "train(DDP(make()), lambda micro_step, is_last: micro_step == 0)",
    "independent": "train(make())",
}
# Of other packages.
ACCELERATE = """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    for micro_step in range(STEPS * ACCUMULATED):
        x, y = batch()
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    """
LIGHTNING = """
    import lightning


    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make()

        def training_step(self, batch, index):
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)


    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, accumulate_grad_batches=ACCUMULATED,
    )
    lit = Lit()
    batches = [batch() for micro_step in range(STEPS * ACCUMULATED)]
    trainer.fit(lit, torch.utils.data.DataLoader(batches, batch_size=None))
    """
OF_PACKAGES = {
    "accelerate": ACCELERATE,
    "accelerate, around DDP": ACCELERATE.replace("model(x)", "accelerator.unwrap_model(model)(x)"),
    "lightning": LIGHTNING,
    "lightning, with a rate each": LIGHTNING.replace("lr=0.01", "lr=0.01 * (1 + dist.get_rank())"),
}
for shape, source in OF_PACKAGES.items():
    if importlib.util.find_spec(shape.partition(",")[0]):
        SHAPES[shape] = source
FORKS = """
SHAPES = {shapes!r}


def rank_main(shape, rank, size):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    Path(f"{{os.getpid()}}.shape").write_text(shape)
    if shape != "independent":
        store = dist.FileStore(os.path.abspath(f"store {{shape}}"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    exec(SHAPES[shape], globals())


for shape in sys.argv[1:] or SHAPES:
    package = shape.partition(",")[0]
    if package in ("accelerate", "lightning"):  # the last shapes
        __import__(package)
    children = []
    size = 4 if shape.endswith("on four") else 2
    for rank in range(size):
        child = os.fork()
        if not child:
            rank_main(shape, rank, size)
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0, shape
"""


def ranks_of(folder: Path, *shapes: str) -> dict[str, list[dict]]:
    """What each rank of each shape has told."""
    sources = {shape: programs.program(source) for shape, source in SHAPES.items()}
    (folder / "train.py").write_text(START + FORKS.format(shapes=sources))
    (folder / "out").mkdir()
    settings = {"warmup": 2, "timed": 1, "profile": 1, "first": 5, "steps": "optimizer"}
    settings |= {"every": 1, "data": [], "then": "continue", "stacks": False}
    settings["out"] = str(folder / "out")
    environment = os.environ | {"WARM_PROGRAMS": "yes"}
    ended = run([sys.executable, "train.py", *shapes], settings, environment)
    assert ended.exit_code == 0
    ranks: dict[str, list[dict]] = {}
    for process in ended.recorded:
        shape = Path(f"{process['pid']}.shape").read_text()
        ranks.setdefault(shape, []).append(process)
    return ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, warm_servers):
    before = Path.cwd()

    def make(folder: Path) -> dict:
        os.chdir(folder)
        return ranks_of(folder)

    folder, told = made_once(tmp_path_factory, "program_ranks", make)
    os.chdir(folder)
    yield told
    os.chdir(before)


pytestmark = pytest.mark.slow


def test_ranks_that_step_with_other_gradients_fail_the_audit(ranks):
    audit = audit_of(ranks["off by one"])
    assert audit.ok is False
    (finding,) = audit.findings
    assert finding.check == "ranks_differ"
    assert finding.between_steps == [None, 1]
    assert len(finding.parameters) == 4
    begin = "ranks train different models: gradients differ from step 1 on in all 4 parameters ("
    assert finding.detail.startswith(begin)
    assert "no_sync() belongs around all micro-steps but the last, train.py:" in finding.detail


def test_ranks_of_sharded_optimizers_fail_the_audit_too(ranks):
    (finding,) = audit_of(ranks["ZeRO, off by one"]).findings
    assert finding.check == "ranks_differ"
    assert "gradients differ from step 1 on in all 4 parameters (" in finding.detail
    assert "no_sync() belongs around all micro-steps but the last, train.py:" in finding.detail


@pytest.mark.parametrize("shape", ["around DDP", "accelerate, around DDP"])
def test_forward_passes_around_the_wrapper_are_named_as_the_cause(ranks, shape):
    if shape not in ranks:
        pytest.skip("needs accelerate")
    audit = audit_of(ranks[shape])
    assert audit.ok is False
    (finding,) = audit.findings
    assert finding.check == "ranks_differ"
    assert "gradients differ from step 1 on in all 4 parameters (" in finding.detail
    assert finding.detail.endswith("and there are none: call the wrapper, not its .module")


def test_gradients_that_a_closure_computes_are_those_that_are_compared(ranks):
    """Lightning accumulates, and the last backward pass is within the optimizer's step."""
    if "lightning" not in ranks:
        pytest.skip("needs lightning")
    audit = audit_of(ranks["lightning, with a rate each"])
    assert audit.ok is False
    (finding,) = audit.findings
    assert finding.check == "ranks_differ"
    assert "parameters differ between step 1 and 2 in all 4 parameters (by " in finding.detail
    (model,) = ranks["lightning"][0]["sketches"]["models"]
    assert (model["micro_steps"], model["times"], model["ends_reduced"]) == (2, 1, True)


def test_ranks_that_reduce_no_more_fail_the_audit(ranks):
    audit = audit_of(ranks["by hand, at first"])
    assert audit.ok is False
    (finding,) = audit.findings
    assert finding.check == "ranks_differ"
    assert finding.between_steps == [2, 4]
    assert "gradients differ between step 2 and 4 in all 4 parameters (norm " in finding.detail


def test_replicas_of_shards_are_compared(ranks):
    (finding,) = audit_of(ranks["replicas with a rate each"]).findings
    assert finding.check == "ranks_differ"
    assert "parameters differ between step 1 and 2 in all 4 parameters (by " in finding.detail


def test_reductions_of_each_micro_step_are_told_and_fail_nothing(ranks):
    audit = audit_of(ranks["around the backward pass"])
    assert audit.ok
    (finding,) = audit.findings
    assert finding.check == "reduced_too_often"
    assert finding.times == 2
    assert finding.where.startswith("train.py:")
    cure = f"no_sync() must hold the forward pass too, {finding.where}"
    assert finding.detail.endswith(cure)
    assert audit_text(audit.as_json()) == f"ok; {finding.detail}"


def test_the_same_batches_on_all_ranks_are_told_and_fail_nothing(ranks):
    audit = audit_of(ranks["same seed"])
    assert audit.ok
    assert [finding.check for finding in audit.findings] == ["same_data"]
    audit = audit_of(ranks["constant batches"])
    assert not audit.findings
    assert audit.notes == ["all ranks get the same constant batch, as synthetic inputs are"]


def test_equal_random_numbers_and_orders_are_told_and_fail_nothing(ranks):
    audit = audit_of(ranks["same dropout"])
    assert audit.ok
    assert [finding.check for finding in audit.findings] == ["same_random_numbers"]
    audit = audit_of(ranks["epochs"])
    assert audit.ok
    (finding,) = audit.findings
    assert finding.check == "repeated_order"
    assert f"set_epoch() before each epoch, {finding.where}" in finding.detail
    assert "the order of epoch 0" in finding.detail


def test_many_small_collectives_are_told_with_what_one_would_cost(ranks):
    audit = audit_of(ranks["by hand, row by row"])
    assert audit.ok
    (finding,) = audit.findings
    assert finding.check == "small_collectives"
    assert finding.times == 16 + 16 + 4 + 4
    assert finding.where.startswith("train.py:")
    assert "ms of the host: one of all of them about " in finding.detail


@pytest.mark.parametrize("shape", ["local SGD", "local SGD of DDP"])
def test_ranks_that_differ_by_design_are_told_once(ranks, shape):
    audit = audit_of(ranks[shape])
    assert audit.ok
    assert not audit.findings
    (note,) = audit.notes
    assert note.startswith("ranks differ in 4 parameters, taken for meant: ")


def test_broadcasts_of_buffers_are_told_with_their_cost_and_fail_nothing(ranks):
    audit = audit_of(ranks["buffers"])
    assert audit.ok
    (finding,) = audit.findings
    assert (finding.check, finding.times) == ("buffers_broadcast", 1)  # none within no_sync()
    assert "before 1 forward pass of a step, 2.0 MB and " in finding.detail
    assert "ms of the host, though all ranks have them already: " in finding.detail
    assert finding.detail.endswith(f"_buffers=False, {finding.where}")


def test_broadcasts_that_cost_nothing_are_not_told():
    buffers = {"numbers": [[1.0]], "bytes": 1000, "ms": [0.4, 0.4], "flag": "broadcast_buffers"}
    model = {"bytes": 10_000, "where": "train.py:9", "buffers": buffers}
    sketches = {rank: {"models": [copy.deepcopy(model)]} for rank in range(2)}
    assert not broadcasts_found(sketches, step_ms=5.0)
    sketches[0]["models"][0]["buffers"]["ms"] = [4.0, 4.0]  # it waited for the other one
    assert not broadcasts_found(sketches, step_ms=5.0)
    sketches[1]["models"][0]["buffers"].update(ms=[2.0, 2.0], numbers=[[2.0]])
    (finding,) = broadcasts_found(sketches, step_ms=5.0)
    assert "4.0 ms of the host, though rank 0 keeps its own either way" in finding.detail
    assert not broadcasts_found(sketches, step_ms=500.0)
    assert not broadcasts_found(sketches, step_ms=None)
    processes = [{"times_ms": [5.0], "disturbance": {"disturbed": False}}, {"times_ms": [6.0]}]
    assert step_ms_of(processes) == 5.0
    processes[0]["disturbance"]["disturbed"] = True  # the other rank waited for it
    assert step_ms_of(processes) is None


def test_a_checkpoint_that_takes_gradients_away_is_named(ranks):
    audit = audit_of(ranks["checkpointed"])
    assert audit.ok is False
    finding = next(one for one in audit.findings if one.check == "missing_gradient")
    (calls,) = {
        (call["where"], call["calls"])
        for rank in ranks["checkpointed"]
        for call in rank["audit"]["reentrant_checkpoints"]
    }
    assert calls == (finding.where, 2)  # of each micro-step, not those without autograd
    assert finding.detail == (
        "4 of 6 parameters have no gradient: checkpoint(use_reentrant=True) of inputs that need"
        f" none takes them away, use_reentrant=False keeps them, {finding.where}"
    )


def test_four_ranks(ranks):
    assert len(ranks["off by one on four"]) == 4
    audit = audit_of(ranks["off by one on four"])
    assert audit.ok is False
    assert [finding.check for finding in audit.findings] == ["ranks_differ"]


SILENT = [
    "accumulates",
    "by hand",
    "ZeRO",
    "frozen",
    "compressed",
    "FSDP2",
    "FSDP2 that reduces once",
    "replicas of FSDP2",
    "two models",
    "saves itself",
    "independent",
    "LoRA",
    "frozen BatchNorm",
    "warm-up from 0",
    "within a closure",
    "uneven inputs",
    "accelerate",
    "lightning",
]


@pytest.mark.parametrize("shape", SILENT)
def test_of_ranks_that_train_one_model_nothing_is_said(ranks, shape):
    if shape in OF_PACKAGES and shape not in ranks:
        pytest.skip(f"needs {shape}")
    audit = audit_of(ranks[shape])
    assert audit.ok
    assert not audit.findings
    assert not audit.notes
    assert "ranks_differ" not in [row["check"] for row in audit.not_checked]


def test_a_rank_that_wrote_nothing_leaves_nothing_concluded(ranks):
    audit = audit_of(ranks["off by one"][:1])
    assert audit.ok
    assert {"check": "ranks_differ", "reason": "nothing was written by rank 1"} in audit.not_checked


def test_skipped_steps_leave_nothing_concluded(ranks):
    audit = audit_of(ranks["scaler that skips"])
    assert audit.ok is None
    assert not audit.findings


def test_ranks_at_other_steps_leave_nothing_concluded(ranks):
    first, second = copy.deepcopy(ranks["off by one"])
    steps = second["sketches"]["steps"]
    second["sketches"]["steps"] = {str(int(step) + 10): rows for step, rows in steps.items()}
    audit = audit_of([first, second])
    assert audit.ok
    reason = "ranks were looked at in other steps each: 1, 2, 4 and 11, 12, 14"
    assert {"check": "ranks_differ", "reason": reason} in audit.not_checked


# Runs of ours, of two steps each; in the last but one, both ranks have the batches of the first; in
# the last one, the second rank's optimizer goes twice as far.
OWN_RUNS = """
import json, os, sys
sys.path.insert(0, {project!r})
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp, torch.distributed.optim
import tiny_llama_v1 as tiny_llama
from harness.program.ranks import compare_ranks
from harness.run.rank_numbers import RankNumbers
from harness.session.session import Session

SMALL = " --hidden-dim 16 --num-layers 1 --seq-len 8 --batch-size 2"


def compared(flags, rank):
    workload, _ = tiny_llama.resolve(tiny_llama.build_parser().parse_args(flags.split()))
    session = Session(workload, torch.device("cpu"), (rank, 2))
    numbers = RankNumbers(session)
    session.step(watching=session.audit)
    session.step()
    numbers.look_at_the_end(2)
    everyone = [None, None]
    dist.all_gather_object(everyone, numbers.as_json())
    ranks = [dict(rank=one, world_size=2, sketches=everyone[one]) for one in range(2)]
    found = compare_ranks(ranks)
    kinds = {{row["why"] for row in everyone[0]["parameters"]}}
    return [row.as_json() for row in found.findings], found.notes, found.not_checked, list(kinds)


def rank_main(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    store = dist.FileStore(os.path.abspath("store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    told = {{}}
    for mode in ("ddp", "zero1", "fsdp"):
        told[mode] = compared(f"--parallel {{mode}}{{SMALL}}", rank)
    own_batches = tiny_llama.batches
    tiny_llama.batches = lambda *arguments: own_batches(*arguments[:3])  # of rank 0
    told["same data"] = compared(f"--parallel ddp{{SMALL}}", rank)
    tiny_llama.batches = own_batches
    build = tiny_llama.build

    def wrong(*arguments):
        state = build(*arguments)
        state.optimizer.param_groups[0]["lr"] *= 1 + rank
        return state

    tiny_llama.build = wrong
    told["wrong"] = compared(f"--parallel ddp{{SMALL}}", rank)
    if rank == 0:
        print(json.dumps(told), file=open("told.json", "w"))


for rank in range(2):
    if not os.fork():
        rank_main(rank)
        os._exit(0)
for rank in range(2):
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def own_runs(tmp_path_factory):
    def make(folder: Path) -> dict:
        (folder / "runs.py").write_text(OWN_RUNS.format(project=str(PROJECT)))
        code, out = finish(start(sys.executable, "runs.py", cwd=folder))
        assert code == 0, out
        return json.loads((folder / "told.json").read_text())

    return made_once(tmp_path_factory, "own_runs_of_ranks", make)[1]


@pytest.mark.parametrize(("mode", "kind"), [("ddp", "DDP"), ("zero1", "DDP"), ("fsdp", "shard")])
def test_ranks_of_our_own_runs_are_compared(own_runs, mode, kind):
    assert own_runs[mode] == [[], [], [], [kind]]


def test_batches_of_our_own_ranks_are_compared(own_runs):
    (finding,), notes, not_checked, _ = own_runs["same data"]
    assert finding["check"] == "same_data"
    assert finding["detail"].startswith("2 ranks train on the same data, the batch of a step, ")
    assert (notes, not_checked) == ([], [])


def test_ranks_of_our_own_that_differ_fail_the_audit(own_runs):
    (finding,), notes, not_checked, _ = own_runs["wrong"]
    assert finding["check"] == "ranks_differ"
    assert finding["between_steps"] == [1, 2]
    assert "parameters differ between step 1 and 2 in all " in finding["detail"]
    assert (notes, not_checked) == ([], [])


def test_findings_over_ranks_make_the_audit_of_a_run_fail():
    audit = Audit(ok=True, findings=[], not_checked=[], gradient_norms={}, notes=[])
    differs = AuditFinding(check="ranks_differ", detail="ranks train different models: ...")
    add_ranks(audit, RankComparison([differs], ["a note"], []))
    assert (audit.ok, audit.findings, audit.notes) == (False, [differs], ["a note"])
    audit = Audit(ok=True, findings=[], not_checked=[], gradient_norms={}, notes=[])
    add_ranks(audit, None)
    reason = "the ranks did not reach the end of the run together"
    assert (audit.ok, audit.not_checked) == (True, [{"check": "ranks_differ", "reason": reason}])
