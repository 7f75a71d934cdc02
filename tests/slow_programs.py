"""Training programs with two planted slownesses each, for tests of profile_program.py.

SLOW: by name, the source and, of each slowness, words of the answer that lead to it; {a line of the
source} stands for its place.  CURES: by name, of each slowness, the replacements that end it.
"""

import textwrap

BEGIN = """
import json
import logging
import sys
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
"""


def program(text: str) -> str:
    return BEGIN + textwrap.dedent(text)


SLOW = {
    "a mask made cell by cell, samples made in the loop": (
        program("""
        def causal(n):
            mask = torch.zeros(n, n)
            for i in range(n):
                for j in range(i + 1, n):
                    mask[i, j] = float("-inf")
            return mask


        class Samples(torch.utils.data.Dataset):
            def __len__(self):
                return 10**6

            def __getitem__(self, index):
                values = [(index * 31 + place * 17) % 97 for place in range(64 * 64)]
                return torch.tensor(values, dtype=torch.float32).reshape(64, 64)


        attention = nn.MultiheadAttention(64, 4, batch_first=True)
        optimizer = torch.optim.AdamW(attention.parameters(), foreach=True)
        for x in torch.utils.data.DataLoader(Samples(), batch_size=16):
            out, _ = attention(x, x, x, attn_mask=causal(64))
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """),
        (("{mask[i, j] =}",), ("{values = [", "{return torch.tensor(values", "num_workers=")),
    ),
    "a value read for each sample, a log written each step": (
        program("""
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        history = []
        for step in range(10**6):
            x, y = torch.randn(2048, 64), torch.randint(10, (2048,))
            losses = F.cross_entropy(model(x), y, reduction="none")
            losses.mean().backward()
            for place in range(2048):
                history.append(losses[place].item())
            with open("log.json", "w") as file:
                json.dump(history[-20_000:] + [0.1] * 10_000, file)
            optimizer.step()
            optimizer.zero_grad()
        """),
        (("{history.append(",), ("{json.dump(",)),
    ),
    "an optimizer's loop, copies that nobody needs": (
        program("""
        pieces = nn.ParameterList([torch.randn(64) for _ in range(500)])
        optimizer = torch.optim.AdamW(pieces.parameters(), foreach=False)
        ballast = torch.randn(4_000_000)
        for step in range(10**6):
            kept = ballast.clone()
            torch.cat(list(pieces)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """),
        (("fused=True", "fused optimizer"), ("{kept = ballast.clone()}",)),
    ),
    "a type that is converted, words that are sorted": (
        program("""
        words = [str(number * 7919 % 100_003) for number in range(500_000)]
        model = nn.Linear(1000, 10)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = torch.randn(2000, 1000)
        for step in range(10**6):
            order = sorted(words, key=len)
            exact = data.double()
            loss = model(exact.float()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """),
        (("{order = sorted(",), ("{exact = data.double()}", "{loss = model(exact.float())")),
    ),
    "norms of all gradients are logged, a batch is collated in Python": (
        program("""
        log = logging.getLogger("train")
        logging.basicConfig(stream=open("log.txt", "w"), level=logging.INFO)


        def collate(rows):
            batch = torch.zeros(64, 64)
            for i, row in enumerate(rows):
                for j, value in enumerate(row):
                    batch[i, j] = value
            return batch


        rows = [[float(i * j % 7) for j in range(64)] for i in range(64)]
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(100)])
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
        for step in range(10**6):
            batch = collate(rows)
            model(batch).square().mean().backward()
            for name, p in model.named_parameters():
                for value in p.grad.flatten()[:6].tolist():
                    log.info("%s %.3f", name, value)
            optimizer.step()
            optimizer.zero_grad()
        """),
        (("{batch[i, j] = value}",), ("{log.info(",)),
    ),
}

CURES = {
    "a mask made cell by cell, samples made in the loop": (
        [
            ("for x in torch", "once = causal(64)\nfor x in torch"),
            ("attn_mask=causal(64)", "attn_mask=once"),
        ],
        [
            (
                "[(index * 31 + place * 17) % 97 for place in range(64 * 64)]",
                "(index * 31 + torch.arange(64 * 64) * 17) % 97",
            ),
            ("torch.tensor(values, dtype=torch.float32)", "values.float()"),
        ],
    ),
    "a value read for each sample, a log written each step": (
        [
            (
                "for place in range(2048):\n        history.append(losses[place].item())",
                "history.extend(losses.tolist())",
            )
        ],
        [
            ('with open("log.json", "w") as file:', "if step % 100 == 99:"),
            (", file)", ", sys.stdout)"),
        ],
    ),
    "an optimizer's loop, copies that nobody needs": (
        [("foreach=False", "fused=True")],
        [("ballast.clone()", "ballast")],
    ),
    "a type that is converted, words that are sorted": (
        [
            (
                "for step in range(10**6):\n    order = sorted(words, key=len)",
                "order = sorted(words, key=len)\nfor step in range(10**6):",
            )
        ],
        [("    exact = data.double()\n", ""), ("exact.float()", "data")],
    ),
    "norms of all gradients are logged, a batch is collated in Python": (
        [("batch = collate(rows)", "batch = torch.tensor(rows)")],
        [("[:6].tolist():", "[:6].tolist() if step % 100 == 99 else ():")],
    ),
}


def cured(name: str) -> str:
    """The program without its slownesses."""
    source, _ = SLOW[name]
    for cure in CURES[name]:
        for slow, fast in cure:
            assert slow in source
            source = source.replace(slow, fast)
    return source
