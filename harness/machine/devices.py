"""Devices: which one to use, which precisions it supports, its memory, and its utilization during
the run."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from harness.base.errors import UserError, first_line
from harness.base.text import BF16_TRUE
from harness.machine.gpu_driver import gpu_driver
from harness.machine.hardware_seen import unseen_hardware
from harness.machine.host_limits import available_host_memory, host_memory_bytes

PRECISIONS = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

CPU_SHARES_HEADS = torch.__version__ >= (2, 9)  # pytorch pull request 157893


def shares_heads(device_type: str, dtype: torch.dtype) -> bool:
    """Whether fused attention reads a key/value head for all query heads that share it.  If not,
    F.scaled_dot_product_attention takes its math kernels, unless the heads are copied."""
    return CPU_SHARES_HEADS if device_type == "cpu" else dtype is not torch.float32


def choose_device(asked: str) -> torch.device:
    """The device for --device; of several GPUs, that of the local rank.  Raises UserError if there
    is no GPU."""
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = unseen_hardware() or f"PyTorch {torch.__version__} sees no GPU, and none was found"
        raise UserError(f"--device cuda: {why}; or use --device cpu")
    # Before this, device_count() may ask amdsmi, which can answer 0 (pytorch issue 186516)
    torch.cuda.init()
    # Modulo: a batch system may give each rank a GPU of its own, which is then the only visible
    # one.
    index = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def architecture(gpu) -> str:
    """The architecture of a GPU, gfx90a:sramecc+:xnack- or sm_90.  gpu: its properties in
    torch.cuda."""
    return gpu.gcnArchName if torch.version.hip else f"sm_{gpu.major}{gpu.minor}"


def check_precision(precision: str, device: torch.device) -> None:
    """Raise UserError for a precision that the device does not support or only emulates."""
    refusal = lacks_precision(precision, device)
    if refusal:
        raise UserError(f"--precision {precision}: {refusal}", exit_code=2)


def lacks_precision(precision: str, device: torch.device) -> str | None:
    """Why the device does not support it, or only emulates it, and what to use; None if it does."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        return missing_arithmetic(precision, gpu.name, architecture(gpu))
    if precision == "tf32":
        return (
            "TF32 exists only in Tensor Cores and Matrix Cores of GPUs; on a CPU use fp32 or bf16"
        )
    if precision == "fp16" and not cpu_trains_in_fp16():
        return f"PyTorch {torch.__version__} cannot train in fp16 on this CPU; use fp32 or bf16"
    return None


def missing_arithmetic(precision: str, name: str, arch: str) -> str | None:
    """What a GPU lacks for a precision, as far as its architecture tells (gfx942, sm_80); None if
    nothing."""
    is_early = arch.startswith("sm_") and int(arch[3:-1]) < 8  # before Ampere
    has_no_tf32 = is_early or (arch.startswith("gfx") and not arch.startswith("gfx94"))
    if precision in ("bf16", BF16_TRUE) and is_early:
        return f"{name} has no bfloat16 arithmetic; use fp16 or fp32"
    if precision == "tf32" and has_no_tf32:
        return f"{name} has no TF32 arithmetic; use fp32, bf16 or fp16"
    return None


def cpu_trains_in_fp16() -> bool:
    """Try a matmul forward and backward under autocast: some builds raise an error, older ones
    silently skip it."""
    weight = torch.ones(2, 2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.autocast("cpu", dtype=torch.float16):
                output = weight @ torch.ones(2, 2)
            output.sum().backward()
        except RuntimeError:
            return False
    return output.dtype is torch.float16


def set_arithmetic(precision: str, deterministic: bool) -> None:
    """Set determinism and the precision of float32 matmuls."""
    set_matmul_precision(precision)
    if deterministic:
        # Read when cuBLAS is initialized.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


@contextlib.contextmanager
def arithmetic_in_force(precision: str, deterministic: bool) -> Iterator[None]:
    """Determinism and the precision of float32 matmuls while the block runs; what was in force
    before it is so again after it.

    Where it is in force already nothing is set, so that this costs a timed step next to nothing."""
    matmuls = torch.get_float32_matmul_precision()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    wanted = (float32_matmuls(precision), deterministic, False)
    if (matmuls, was_deterministic, warns_only) == wanted:
        yield
        return
    set_arithmetic(precision, deterministic)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmuls)
        torch.use_deterministic_algorithms(was_deterministic, warn_only=warns_only)


def float32_matmuls(precision: str) -> str:
    """What torch.set_float32_matmul_precision() calls the arithmetic of float32 matmuls under
    --precision."""
    return "high" if precision == "tf32" else "highest"


def set_matmul_precision(precision: str) -> None:
    """Whether matmuls of float32 tensors compute in TF32."""
    torch.set_float32_matmul_precision(float32_matmuls(precision))
    if precision == "tf32" and torch.version.hip:
        os.environ.setdefault("HIPBLASLT_ALLOW_TF32", "1")  # older ROCm builds also require it


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Whether matmuls of float32 tensors compute in TF32 while the block runs."""
    before = torch.get_float32_matmul_precision()
    set_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- Memory --------------------------------------------------------------------------------------


def total_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory_bytes()


def memory_of_a_rank(device: torch.device) -> tuple[int, int]:
    """Bytes of the device (on a CPU, host memory / local ranks), and those of them that are in use:
    by other processes, the driver and this process.  On a GPU that is its context, created here at
    the latest, without what its allocator has reserved."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, max(0, total - free - torch.cuda.memory_reserved(device))
    total, available = total_memory(device), available_host_memory()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return total // ranks, host_memory()[0] if available is None else (total - available) // ranks


def host_memory() -> tuple[int, int]:
    """Resident set size of this process in bytes: current and peak.  Without /proc only the peak is
    known."""
    try:
        text = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        unit_bytes = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
        return peak, peak
    lines = dict(line.split(":", 1) for line in text.splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024, int(lines["VmHWM"].split()[0]) * 1024


# ---- Utilization ---------------------------------------------------------------------------------


class DeviceSampler(threading.Thread):
    """Reads memory and GPU utilization ten times a second, in a thread beside the training."""

    def __init__(self, device: torch.device):
        super().__init__(daemon=True)
        self.device, self.on_gpu = device, device.type == "cuda"
        self.memory_bytes: list[int] = []
        self.peak_bytes: int | None = None
        allocated = "bytes allocated to tensors by PyTorch's caching allocator"
        resident = (
            "resident set size of the process, libraries included (--profile-memory counts only"
            " tensors)"
        )
        self.memory_source = allocated if self.on_gpu else resident
        self.utilization_percent: list[int] = []
        self.utilization_reason = None if self.on_gpu else "no GPU in use"
        self._read_utilization: Callable[[], int] | None = None
        self._stop_requested = threading.Event()

    def sample(self) -> None:
        in_use = torch.cuda.memory_allocated(self.device) if self.on_gpu else host_memory()[0]
        self.memory_bytes.append(in_use)
        if self.utilization_reason is not None:
            return
        try:
            if self._read_utilization is None:
                self._read_utilization = gpu_driver(self.device).utilization_percent
            self.utilization_percent.append(self._read_utilization())
        except (OSError, ValueError) as error:
            self.utilization_reason = f"the driver does not tell: {first_line(error)}"

    def run(self) -> None:
        while not self._stop_requested.wait(0.1):
            self.sample()

    def __enter__(self) -> DeviceSampler:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.sample()
        self.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop_requested.set()
        self.join()
        self.sample()
        peak = torch.cuda.max_memory_allocated(self.device) if self.on_gpu else host_memory()[1]
        self.peak_bytes = max(peak, *self.memory_bytes)  # Linux updates VmHWM later than VmRSS
