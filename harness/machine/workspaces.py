"""What the matmul libraries allocate for themselves on a GPU: measured in a process that has not
used them before."""

import subprocess
import sys

import torch

from harness import PROJECT
from harness.machine.devices import PRECISIONS, set_matmul_precision, synchronize

SIZE = 256  # of the matrices: their workspace does not depend on it
LIMIT_S = 120  # a first start of ROCm's libraries takes tens of seconds


def workspace_bytes(device: torch.device, precision: str) -> int:
    """Bytes that stay allocated after a matmul and a batched one, forward and backward, whose
    threads have a library handle each.  Right only in a process that has run none before."""
    if device.type == "cpu":
        return 0
    before, dtype = torch.cuda.memory_allocated(device), PRECISIONS[precision]
    set_matmul_precision(precision)
    x = torch.ones(2, SIZE, SIZE, device=device, requires_grad=True)  # [batch, rows, columns]
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
        y = torch.bmm(x, x)
        loss = (y[0] @ y[1]).float().sum()
    loss.backward()
    synchronize(device)
    del x, y, loss
    return torch.cuda.memory_allocated(device) - before


def library_workspaces(device: torch.device, precision: str) -> int | None:
    """The same, measured in a process of its own; None where that fails, such as on a GPU in
    exclusive mode."""
    if device.type == "cpu":
        return 0
    command = [sys.executable, "-m", "harness.machine.workspaces", str(device), precision]
    try:
        done = subprocess.run(
            command, cwd=PROJECT, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        return int(done.stdout.split()[-1])
    except (subprocess.SubprocessError, IndexError, ValueError):
        return None


if __name__ == "__main__":
    print(workspace_bytes(torch.device(sys.argv[1]), sys.argv[2]))
