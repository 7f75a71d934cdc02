"""What a run prints before its first step: what is about to run, on which device."""

from pathlib import Path

import torch

from harness.base.console import RULE
from harness.base.text import count_of
from harness.base.units import MB
from harness.instruments.schedule import InstrumentSchedule, ProfilerConfig
from harness.machine.environment import Environment
from harness.model.workload import Workload
from harness.ranks.parallel import mode_text


def workload_lines(
    workload: Workload, profiling: ProfilerConfig, device: torch.device
) -> list[str]:
    """The title, the settings, and the size of the model."""
    mode = ""
    if profiling.records_trace or profiling.enable_deepspeed_flops:
        mode = " (Profiling Enabled)"
    elif profiling.profile_memory or profiling.memory_snapshot:
        mode = " (Memory Profiling)"
    parameters, forward_flops = workload.parameter_count(), workload.forward_flops()
    lines = [RULE, f"{workload.title}{mode}", RULE, "Configuration:"]
    lines += [f"  {label}: {value}" for label, value in workload.settings_lines(device).items()]
    lines += ["", "Model Configuration:", f"  Total Parameters: {parameters:,}"]
    lines.append(f"  Model Size: {4 * parameters / MB:.1f} MB (FP32)")
    if forward_flops is not None:
        lines.append(f"  Forward FLOPs per Step: {forward_flops:,} (matmuls)")
    return lines


def device_lines(environment: Environment) -> list[str]:
    """The device that trains, and warnings such as a GPU that PyTorch does not see."""
    device, cpu = environment.device, environment.cpu
    lines = [f"Using device: {device.type}"]
    if device.type == "cuda":
        lines.append(f"GPU: {device.name} ({device.arch}, {device.memory_bytes / MB:,.0f} MB)")
    else:
        threads = count_of(cpu.torch_threads, "thread")
        lines.append(f"CPU: {cpu.name} ({threads}, {cpu.logical_cores} logical cores)")
    return lines + [f"Warning: {warning}" for warning in environment.warnings]


def sharing_lines(workload: Workload, world_size: int) -> list[str]:
    """How several ranks share the work."""
    if world_size == 1:
        return []
    shared = mode_text(workload.parallel)
    return [f"Ranks: {world_size}, each with {workload.batch_size} samples per step ({shared})"]


def profiling_lines(schedule: InstrumentSchedule, trace_folder: Path | None) -> list[str]:
    """Which steps are recorded, and where to; trace_folder is None if none is."""
    lines = []
    if schedule.window:
        first, last = schedule.window
        steps = f"step {last} is" if last == first + 1 else f"steps {first + 1} to {last} are"
        lines.append(f"Profiling enabled: Steps {first}-{last} ({steps} recorded)")
    lines += [f"Note: {note}" for note in schedule.notes]
    if trace_folder:
        lines.append(f"Profile data will be saved to: {trace_folder}/")
    return lines
