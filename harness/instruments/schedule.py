"""What of a run is profiled, and which step carries which instrument."""

from __future__ import annotations

from dataclasses import dataclass

from harness.base.command_line import flag, peak_choice
from harness.base.console import world_size_of_run


@dataclass(frozen=True)
class ProfilerConfig:
    """What is recorded in addition to the timings of every run."""

    enable_pytorch_profiler: bool = flag(False, "record a trace with torch.profiler")
    profile_dir: str | None = flag(
        None,
        "of traces; of the run too, without --output-dir",
        metavar="DIR",
        shown="--output-dir, else ./pytorch_profiles",
    )
    profile_steps: int = flag(5, "steps in the trace")
    warmup_steps: int = flag(5, "steps before the profiling window", minimum=0)
    profile_stacks: bool = flag(
        False, "Python stacks and modules in the trace, much larger; implies the profiler"
    )
    profile_operators: bool = flag(
        False, "print the largest operators, all tables with --verbose; implies profiling"
    )
    gzip: bool = flag(False, "compress the trace")
    no_sync_steps: int = flag(
        0,
        "with several ranks: steps after training with and without reducing gradients, to compare",
        minimum=0,
    )
    profile_memory: bool = flag(
        False, "record every tensor of one step", alias="--enable-memory-profiling"
    )
    memory_snapshot: bool = flag(
        False, "who holds the memory of a GPU in one step, by line: its allocator's history"
    )
    system_profiler: bool = flag(
        False, "enable capture by nsys or rocprofv3; set by run_system_profiler.sh"
    )
    enable_deepspeed_flops: bool = flag(False, "count FLOPs with DeepSpeed's profiler in one step")
    flops_profile_step: int = flag(10, "step in which DeepSpeed counts FLOPs")
    peak: str | float = flag(
        "auto",
        "for MFU: auto (by datasheet, else measured), measured, or TFLOP/s",
        metavar="PEAK",
        type=peak_choice,
    )

    # --enable-all-profiling
    ALL = (
        "enable_pytorch_profiler",
        "profile_stacks",
        "profile_operators",
        "profile_memory",
        "enable_deepspeed_flops",
    )

    @property
    def records_trace(self) -> bool:
        return self.enable_pytorch_profiler or self.profile_stacks or self.profile_operators

    @property
    def enabled(self) -> bool:
        return (
            self.records_trace
            or self.profile_memory
            or self.memory_snapshot
            or self.enable_deepspeed_flops
        )


class InstrumentSchedule:
    """Which steps are measured by an instrument.  Two share a step only if there
    are too few steps."""

    def __init__(self, num_steps: int, profiling: ProfilerConfig):
        self.num_steps = num_steps
        self.window: tuple[int, int] | None = (
            None  # the profiled steps are window[0] + 1 to window[1]
        )
        self.flops_step = self.memory_step = self.snapshot_step = None
        self.snapshot_early = range(0)  # steps that are recorded in case memory runs out in them
        self.notes: list[str] = []  # which instrument was moved to another step, and why
        if profiling.records_trace or profiling.system_profiler:
            others = (
                profiling.enable_deepspeed_flops
                + profiling.profile_memory
                + profiling.memory_snapshot
            )
            self._schedule_window(profiling.warmup_steps, profiling.profile_steps, others)
        if profiling.enable_deepspeed_flops:
            self._schedule_flops(profiling.flops_profile_step)
        if profiling.profile_memory:
            # DistributedDataParallel rebuilds its buckets once, in the second step.
            self.memory_step = self._free_step(2 if world_size_of_run() == 1 else 3)
        if profiling.memory_snapshot:
            self.snapshot_step = self._free_step(2)
            # The second step has the state of the optimizer beside the activations: what lasts so
            # long lasts longer.
            self.snapshot_early = range(1, min(self.snapshot_step, 3))

    def _schedule_window(self, warmup_steps: int, length: int, others: int) -> None:
        """The requested window, moved and shortened so that the other instruments also fit."""
        requested = (warmup_steps, warmup_steps + length)
        last = min(requested[1], self.num_steps)
        if others:
            # Reserved: the first step, one step per other instrument, the profiler's warm-up, two
            # for the averages.
            length = max(1, min(length, self.num_steps - others - 4))
        self.window = first, last = max(0, last - length), last
        if self.window != requested:
            reason = f"{requested[0]}-{requested[1]} does not fit in {self.num_steps} steps"
            reason += " with the other instruments" if others else ""
            self.notes.append(f"Profiling window moved to steps {first}-{last}: {reason}")

    def _schedule_flops(self, requested: int) -> None:
        self.flops_step = self._free_step(min(requested, self.num_steps))
        if self.flops_step != requested:
            reason = (
                "the run is shorter"
                if requested > self.num_steps
                else "that step is used by another instrument"
            )
            self.notes.append(
                f"FLOPs profile moved from step {requested} to {self.flops_step}: {reason}"
            )

    def _free_step(self, wanted: int) -> int:
        """The nearest step without an instrument; else the nearer of first and warm-up step; else
        the last."""
        for free in ((None,), ("first", "profiler warm-up")):
            for distance in range(self.num_steps):
                for step in (wanted + distance, wanted - distance):
                    if 1 <= step <= self.num_steps and self.exclusion_reason(step) in free:
                        return step
        return self.num_steps

    def exclusion_reason(self, step: int) -> str | None:
        """Why this step is excluded from averages, or None."""
        first, last = self.window or (None, None)
        if first is not None and first < step <= last:
            return "profiled"
        reasons = {  # of equal keys the last one applies
            first: "profiler warm-up",
            1: "first",
            self.flops_step: "FLOPs counted",
            self.memory_step: "memory recorded",
            self.snapshot_step: "snapshot",
        }
        return reasons.get(step)
