"""Training programs as others write them, by the name of their shape, for tests of
profile_program.py: tiny, and each prints what must not change.  They know nothing of this project.

SHAPES: those that need torch alone; TRAINERS: those of other packages, by the package; RANKS: for
torchrun.
"""

import textwrap

MODEL = """
import sys
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + F.dropout(self.down(F.relu(self.up(self.norm(x)))), 0.1, self.training)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(count):
    for _ in range(count):
        yield torch.randn(8, 16), torch.randint(4, (8,))


STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 14
torch.manual_seed(0)
"""
TRAIN = """
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""
LOOP = """
for step, (x, y) in enumerate(batches(STEPS)):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()), flush=True)
print("random", torch.get_rng_state().sum().item(), torch.rand(()).item())
"""


def program(*parts: str) -> str:
    return "\n".join(textwrap.dedent(part) for part in parts)


PLAIN = program(MODEL, TRAIN, LOOP)

SHAPES = {
    "plain": PLAIN,
    "loader, clipping and a schedule": program(
        MODEL,
        TRAIN,
        """
        from torch.utils.data import DataLoader, TensorDataset

        data = TensorDataset(torch.randn(8 * STEPS, 16), torch.randint(4, (8 * STEPS,)))
        loader = DataLoader(data, 8, shuffle=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        """,
    ),
    "accumulation": program(
        MODEL,
        TRAIN,
        """
        for step, (x, y) in enumerate(batches(3 * STEPS)):
            (F.cross_entropy(model(x), y) / 3).backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        """,
    ),
    "skipped steps": program(
        MODEL,
        TRAIN,
        """
        scaler, skipped = torch.amp.GradScaler("cpu", init_scale=16.0), 0
        for step, (x, y) in enumerate(batches(STEPS)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) * (float("inf") if step % 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            skipped += scaler.get_scale() < scale
            print("skipped", skipped, flush=True)
        """,
    ),
    "two optimizers": program(
        MODEL,
        """
        generator, critic = Net(), Net()
        of_critic = torch.optim.Adam(critic.parameters())
        of_generator = torch.optim.RMSprop(generator.parameters())
        to_image = nn.Linear(4, 16).requires_grad_(False)
        for step, (x, y) in enumerate(batches(STEPS)):
            of_critic.zero_grad()
            made = to_image(generator(x))
            (critic(x).mean() - critic(made.detach()).mean()).backward()
            of_critic.step()
            of_generator.zero_grad()
            critic(made).mean().backward()
            of_generator.step()
        """,
    ),
    "five critic steps": program(
        MODEL,
        """
        generator, critic = Net(), Net()
        of_critic = torch.optim.Adam(critic.parameters())
        of_generator = torch.optim.RMSprop(generator.parameters())
        to_image = nn.Linear(4, 16).requires_grad_(False)
        for step, (x, y) in enumerate(batches(STEPS)):
            for _ in range(5):
                of_critic.zero_grad()
                with torch.no_grad():
                    made = to_image(generator(x))
                between = (x + made).requires_grad_()
                slope, = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
                (critic(x).mean() - critic(made).mean() + slope.square().mean()).backward()
                of_critic.step()
            of_generator.zero_grad()
            critic(to_image(generator(x))).mean().backward()
            of_generator.step()
        """,
    ),
    "optimizers in the backward pass": program(
        MODEL,
        """
        model = Net()
        optimizers = {p: torch.optim.SGD([p], lr=0.01, momentum=0.9) for p in model.parameters()}

        def step_at_once(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step_at_once)
        for x, y in batches(STEPS):
            F.cross_entropy(model(x), y).backward()
        """,
    ),
    "an optimizer of its own": program(
        MODEL,
        """
        class Sign(torch.optim.Optimizer):
            def __init__(self, parameters):
                super().__init__(parameters, {"lr": 0.01})

            @torch.no_grad()
            def step(self):
                for group in self.param_groups:
                    for p in group["params"]:
                        p -= group["lr"] * p.grad.sign()


        class SlowSign(Sign):
            def step(self):
                super().step()


        model = Net()
        optimizer = SlowSign(model.parameters())
        """,
        LOOP,
    ),
    "a closure": program(
        MODEL,
        """
        model = Net().eval()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        for x, y in batches(STEPS):
            def closure():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        """,
    ),
    "compiled": program(
        MODEL,
        TRAIN,
        """
        import torch._dynamo.utils

        model = torch.compile(model, backend="aot_eager")
        """,
        LOOP,
        """
        counted = torch._dynamo.utils.counters
        print("graphs", counted["stats"]["unique_graphs"], "breaks", dict(counted["graph_break"]))
        """,
    ),
    "compiled as one graph": program(
        MODEL,
        """
        model = Net()
        model.blocks[0].compile(fullgraph=True, backend="eager")
        model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
        optimizer = torch.optim.AdamW(model.parameters())
        """,
        LOOP,
    ),
    "compiled again later": program(
        MODEL,
        TRAIN,
        """
        import torch._dynamo.utils

        model = torch.compile(model, backend="eager", fullgraph=True)
        for step, (x, y) in enumerate(batches(STEPS)):
            size = 8 if step < 4 else 6  # where steps are recorded
            loss = F.cross_entropy(model(x[:size]), y[:size])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(step, repr(loss.item()), flush=True)
        print("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"])
        """,
    ),
    # Of matmuls alone, for which Inductor has no kernel to generate and build: that takes seconds.
    "compiled by Inductor": program(
        MODEL,
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.head = nn.Linear(16, 32, bias=False), nn.Linear(32, 4, bias=False)

            def forward(self, x):
                return self.head(self.up(x))
        """,
        TRAIN,
        "model = torch.compile(model, fullgraph=True)",
        LOOP,
    ),
    "checkpointing": program(
        MODEL,
        """
        from torch.utils.checkpoint import checkpoint


        class Recomputed(Net):
            def forward(self, x):
                x = checkpoint(self.blocks[0], x, use_reentrant=False)
                x = checkpoint(self.blocks[1], x, use_reentrant=True)
                return self.head(x)


        model = Recomputed()
        optimizer = torch.optim.AdamW(model.parameters())
        """,
        LOOP,
    ),
    "evaluation": program(
        MODEL,
        TRAIN,
        """
        for step, (x, y) in enumerate(batches(STEPS)):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (4, 11):  # in one of the recorded steps, and then in none
                model.eval()
                with torch.no_grad():
                    for x, y in batches(2):
                        model(x)
                model.train()
        """,
    ),
    "evaluation in each step": program(
        MODEL,
        TRAIN,
        """
        for x, y in batches(STEPS):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.inference_mode():
                model(x)
            model.train()
        """,
    ),
    "a frozen teacher": program(
        MODEL,
        """
        class Distillation:
            def __init__(self):
                self.teacher, self.student = Net().eval().requires_grad_(False), Net()
                self.optimizer = torch.optim.AdamW(self.student.parameters())

            def train(self):
                for x, y in batches(STEPS):
                    with torch.no_grad():
                        wanted = self.teacher(x).softmax(-1)
                    F.cross_entropy(self.student(x), wanted).backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()


        Distillation().train()
        """,
    ),
    "objects that are put aside": program(
        MODEL,
        TRAIN,
        """
        import gc, io

        log = open("log.txt", "w")
        gc.freeze()
        gc.disable()
        for step, (x, y) in enumerate(batches(STEPS)):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            print(step, file=log)
        """,
    ),
    "one optimizer after another": program(
        MODEL,
        TRAIN,
        """
        warm_up = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, (x, y) in enumerate(batches(STEPS + 120)):
            F.cross_entropy(model(x), y).backward()
            (warm_up if step < 3 else optimizer).step()
            optimizer.zero_grad()
        """,
    ),
    "loader workers": program(
        MODEL,
        TRAIN,
        """
        from torch.utils.data import DataLoader, Dataset


        class Made(Dataset):
            def __len__(self):
                return 8 * STEPS

            def __getitem__(self, index):
                return F.relu(torch.full((16,), index / 100)), index % 4


        if __name__ == "__main__":
            loader = DataLoader(
                Made(), 4 * STEPS, num_workers=2, multiprocessing_context=sys.argv[2]
            )
            # Workers start in recorded steps.
            for x, y in (batch for epoch in range(STEPS // 2) for batch in loader):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        """,
    ),
    "does all sorts of things": program(
        """
        import copy, io, os, pickle, random, signal, sys, threading

        os.makedirs("elsewhere", exist_ok=True)
        os.chdir("elsewhere")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM):
            signal.signal(number, lambda *_: print("a signal", flush=True))
        """,
        MODEL,
        TRAIN,
        """
        model.register_buffer("average", torch.zeros(16))
        for x, y in batches(STEPS):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            copied = copy.deepcopy(model)
            copied(x)
            pickled = pickle.dumps(model)
            torch.save({"model": model, "optimizer": optimizer.state_dict()}, io.BytesIO())
            assert not model._forward_hooks and not model._forward_pre_hooks
            thread = threading.Thread(target=lambda: F.cross_entropy(copied(x), y).backward())
            thread.start()
            thread.join()
        print(len(pickled))
        """,
    ),
    "catches all": program(
        MODEL,
        TRAIN,
        """
        for x, y in batches(STEPS):
            try:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            except BaseException as error:
                print("caught", type(error).__name__, flush=True)
        """,
    ),
    "leaves by sys.exit": program(
        MODEL,
        TRAIN,
        """
        def main():
            for step, (x, y) in enumerate(batches(STEPS)):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 9:
                    sys.exit(7)

        main()
        """,
    ),
    "a profiler of its own, early": program(
        MODEL,
        TRAIN,
        """
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1)
        with torch.profiler.profile(schedule=schedule) as profiler:
            for x, y in batches(STEPS):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                profiler.step()
        print("profiled", any("addmm" in event.key for event in profiler.key_averages()))
        """,
    ),
    "a profiler of its own, overlapping": program(
        MODEL,
        TRAIN,
        """
        for step, (x, y) in enumerate(batches(STEPS)):
            if step == 4:  # where ours is on
                profiler = torch.profiler.profile()
                profiler.start()
            F.cross_entropy(model(x), y).backward()
            if step == 6:
                profiler.stop()
                found = any("addmm" in event.key for event in profiler.key_averages())
                print("profiled", found, flush=True)
            optimizer.step()
            optimizer.zero_grad()
        """,
    ),
    "inference": program(
        MODEL,
        """
        model = Net().eval()
        with torch.inference_mode():
            for x, _ in batches(STEPS):
                print(model(x).argmax(-1).tolist(), flush=True)
        """,
    ),
    "late optimizer": program(
        MODEL,
        TRAIN,
        """
        later = nn.Linear(4, 4)
        second = torch.optim.SGD(later.parameters(), lr=0.1)
        for step, (x, y) in enumerate(batches(STEPS)):
            F.cross_entropy(later(model(x)), y).backward()
            optimizer.step()
            if step >= 4:
                second.step()
            optimizer.zero_grad()
        """,
    ),
    "hand-written step": program(
        MODEL,
        """
        model = Net()
        for x, y in batches(STEPS):
            F.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                p.data -= 0.01 * p.grad
                p.grad = None
        """,
    ),
    "mistakes": program(
        MODEL,
        """
        model, forgotten = Net(), nn.Linear(4, 4)
        model.forgotten, model.unused = forgotten, nn.Linear(4, 4)
        model.head.bias.requires_grad_(False)
        still = {"params": [model.blocks[0].up.weight], "lr": 0.0}
        given = [
            p for n, p in model.named_parameters()
            if not n.startswith("forgotten") and n != "blocks.0.up.weight"
        ]
        optimizer = torch.optim.SGD([{"params": given}, still], lr=0.1)
        for x, y in batches(STEPS):
            F.cross_entropy(forgotten(model(x)), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    ),
}

RANKS = {
    "DDP with ZeRO": program(
        MODEL,
        """
        import torch.distributed as dist
        from torch.distributed.optim import ZeroRedundancyOptimizer

        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(Net())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        for x, y in batches(STEPS):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    ),
    "FSDP2": program(
        MODEL,
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        model = Net()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for x, y in batches(STEPS):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    ),
}
OPTIMIZERS_ON_A_THREAD = program(
    MODEL,
    """
    import threading

    model = Net()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def step_as_on_a_gpu(p):
        thread = threading.Thread(target=optimizers[p].step)
        thread.start()
        thread.join()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_as_on_a_gpu)
    for x, y in batches(STEPS):
        F.cross_entropy(model(x), y).backward()
    """,
)
# The first rank evaluates in a recorded step, so it records once more, and needs the other in its
# later steps.
EVALUATED_BY_ONE_RANK = program(
    MODEL,
    """
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (x, y) in enumerate(batches(STEPS)):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 4 and dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                model.module(x)
            model.train()
    """,
)
SPAWNED = program(
    MODEL,
    """
    import os, socket
    import torch.distributed as dist
    import torch.multiprocessing as mp


    def rank_main(rank, port):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        dist.init_process_group("gloo", rank=rank, world_size=2)
        model = nn.parallel.DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x, y in batches(STEPS):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        del model  # it holds the process group
        dist.destroy_process_group()


    if __name__ == "__main__":
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        mp.spawn(rank_main, (port,), nprocs=2)
    """,
)

TRAINERS = {
    "transformers": program(
        MODEL,
        """
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

        sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                     num_attention_heads=2, vocab_size=64)
        model = LlamaForCausalLM(LlamaConfig(**sizes))
        data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (2 * STEPS, 8))]
        arguments = TrainingArguments(
            "out", per_device_train_batch_size=2, num_train_epochs=1, report_to="none",
            use_cpu=True, logging_steps=1, save_strategy="no", disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=data).train()
        """,
    ),
    "accelerate": program(
        MODEL,
        TRAIN,
        """
        from accelerate import Accelerator
        from torch.utils.data import DataLoader, TensorDataset

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        data = TensorDataset(torch.randn(16 * STEPS, 16), torch.randint(4, (16 * STEPS,)))
        loader = DataLoader(data, 8)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        """,
    ),
    "lightning": program(
        MODEL,
        """
        import lightning
        from torch.utils.data import DataLoader, TensorDataset


        class Lit(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = Net()

            def training_step(self, batch, index):
                loss = F.cross_entropy(self.net(batch[0]), batch[1])
                self.log("loss", loss)
                return loss

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters())


        data = TensorDataset(torch.randn(8 * STEPS, 16), torch.randint(4, (8 * STEPS,)))
        loader = DataLoader(data, 8)
        lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
                          enable_checkpointing=False, enable_model_summary=False).fit(Lit(), loader)
        """,
    ),
    "ignite": program(
        MODEL,
        TRAIN,
        """
        from ignite.engine import Events, create_supervised_trainer
        from torch.utils.data import DataLoader, TensorDataset

        data = TensorDataset(torch.randn(8 * STEPS, 16), torch.randint(4, (8 * STEPS,)))
        loader = DataLoader(data, 8)
        trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: print(engine.state.output, flush=True)
        )
        trainer.run(loader, max_epochs=1)
        """,
    ),
}
