"""What every run writes: config.json and performance_summary.json.

In all documents: a field whose type allows None has a sibling <name>_reason, a string, wherever it
is null.  What is a file also has schema_version.  Times are milliseconds, sizes bytes or MB (2^20
bytes), rates per second, shares between 0 and 1, as the names say.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired

from harness.documents.schema import Document, different_lengths, field

NO_STEP, ONE_STEP = "no step was completed", "needs at least two steps"
NO_FLOPS = "the step has no FLOP formula, and cannot be counted on fake tensors"
NO_CHECKOUT = "the project is not in a git checkout, or git is missing"
NOT_RUN = "nothing was measured"
NO_READING = "no reading was taken"
NOT_FINITE = "not a finite number"
UNREPORTED = "not reported by the system"
NO_RATES = "no published or measured step time confirms what this device reaches"
NO_INTERVAL = "no steps of such devices were compared yet"
THEIRS = "not known of another program"


class Device(Document):
    type: str = field("cpu, or cuda for CUDA and ROCm")
    name: str = field("as the driver or the system calls it")
    arch: NotRequired[str] = field("gcnArchName or sm_XY; GPUs only")
    compute_units: NotRequired[int] = field("multiprocessors; GPUs only")
    memory_bytes: NotRequired[int] = field("of the device; GPUs only")


class Cpu(Document):
    name: str = field("model of the processor")
    logical_cores: int = field("of the machine")
    torch_threads: int = field("that PyTorch uses for one operator")


class Environment(Document):
    timestamp: str = field("start of the run, ISO 8601 with time zone")
    command_line: str = field("that repeats the run")
    commit: str | None = field("of the project", null=NO_CHECKOUT)
    uncommitted_changes: bool | None = field(
        "whether files of the project differ from that commit", null=NO_CHECKOUT
    )
    changes_sha256: str | None = field(
        "of these changes, as git diff shows them", null="there are none"
    )
    host: str = field("name of the machine")
    platform: str = field("operating system and kernel")
    python: str = field("version")
    packages: dict[str, str | None] = field("version by package", null="not installed")
    hip: str | None = field("version that PyTorch was built for", null="not a ROCm build")
    cuda: str | None = field("version that PyTorch was built for", null="not a CUDA build")
    device: Device = field("that trains")
    cpu: Cpu = field("of the host")
    variables: dict[str, str] = field("environment variables that affect PyTorch")
    warnings: list[str] = field("such as a GPU that PyTorch does not see; empty: none")

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """Nothing runs without PyTorch."""
        return None if value["packages"].get("torch") else "packages.torch: is missing"


class Settings(Document):
    model: dict[str, Any] = field(
        "parameters; fields of TinyLlamaConfig and --size, or file and class of --workload"
    )
    training: dict[str, Any] = field("fields of TrainingConfig: flags as they took effect")
    profiling: dict[str, Any] = field("fields of ProfilerConfig")

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """What every workload tells of itself, and reports read."""
        needed = {"model": ("parameters",), "training": ("batch_size", "precision")}
        for section, names in needed.items():
            for name in names:
                if name not in value[section]:
                    return f"{section}.{name}: is missing"
        parameters = value["model"]["parameters"]
        return None if isinstance(parameters, int) else f"model.parameters: is {parameters}"


class RunConfig(Settings):
    environment: Environment = field("enough to repeat the run")


class Timing(Document):
    mean: float | None = field("ms", null=NO_STEP)
    median: float | None = field("ms", null=NO_STEP)
    std: float | None = field("ms, sample standard deviation", null=ONE_STEP)
    p95: float | None = field("ms, 95th percentile", null=NO_STEP)
    count: int = field("steps")


class ExpectedTime(Document):
    """Of a step, from rates that the device reaches: docs/expected_time.md."""

    median: float = field("ms")
    low: float | None = field(
        "ms: from here to `high` nine of ten published and measured steps lay", null=NO_INTERVAL
    )
    high: float | None = field("ms: the other end", null=NO_INTERVAL)
    by_class: dict[str, float] = field("ms by what takes them, which add up to the median")
    tokens_per_sec: float = field("of each rank")
    mfu_percent: float | None = field(
        "of the peak that the lower bound refers to", null="no peak of it is known"
    )
    bound: str = field(
        "compute, memory, communication, launch: the longest part; launch if the host is never"
        " ahead"
    )
    launches: int = field("of kernels, in a step")
    host_ms: float = field("that launching takes the host")
    rates_source: str = field("of the rates")


class CompilationTimes(Document):
    compile_s: float = field("seconds, before step 1")
    from_cache: bool = field("code compiled by an earlier run was used")
    uncompiled_pass_ms: float = field("median of a forward and backward pass")
    compiled_pass_ms: float = field("median of a forward and backward pass")
    passes: int = field("timed for each median")
    saved_ms_per_step: float = field("negative: lost")
    break_even_step: int | None = field(
        "step by which compiling has paid", null="a compiled pass was not faster"
    )


class GradientNorm(Document):
    """The 2-norm of all gradients as one vector, before they are clipped."""

    first: float | None = field("at the first step", null=NO_STEP)
    last: float | None = field("at the last step", null=NO_STEP)
    max: float | None = field("the largest", null=NO_STEP)
    clipped_steps: int = field(
        "steps whose norm was larger than --grad-clip; none that fp16's gradient scaler skipped"
    )


class Progress(Document):
    num_steps: int = field("requested")
    completed_steps: int = field("of these")
    batch_size: int | None = field("samples per step and rank", null=THEIRS)
    sequence_length: int | None = field("tokens", null=THEIRS)
    rank: int = field("which measured this; figures that are not of all ranks are its own")
    world_size: int = field("ranks")
    parallel: str | None = field("how they share the work: ddp, zero1, fsdp", null="one rank")
    grad_norm: GradientNorm | None = field("of all gradients", null="--grad-clip was not given")


class Performance(Document):
    avg_step_time_ms: float | None = field("mean over the averaged steps", null=NO_STEP)
    median_step_time_ms: float | None = field("over the averaged steps", null=NO_STEP)
    std_step_time_ms: float | None = field("sample standard deviation", null=ONE_STEP)
    p95_step_time_ms: float | None = field("95th percentile", null=NO_STEP)
    first_step_time_ms: float | None = field("excluded from averages", null=NO_STEP)
    expected_step_time_ms: NotRequired[ExpectedTime | None] = field(
        "of a run with a prediction", null=NO_RATES
    )
    samples_per_sec: float | None = field("of all ranks", null=NO_STEP)
    tokens_per_sec: float | None = field("of all ranks", null=NO_STEP)
    avg_data_time_ms: float | None = field("mean", null=NO_STEP)
    avg_forward_time_ms: float | None = field("mean", null=NO_STEP)
    avg_backward_time_ms: float | None = field("mean", null=NO_STEP)
    avg_optimizer_time_ms: float | None = field("mean", null=NO_STEP)
    model_flops_per_step: int | None = field(
        "matmul FLOPs of one rank, forward and backward", null=NO_FLOPS
    )
    achieved_tflops: float | None = field("10^12 FLOP/s of one rank", null=NO_STEP)
    gpu_utilization_percent: float | None = field(
        "median of ten samples a second", null="no GPU in use"
    )
    steps_averaged: int = field("that the averages are taken over")
    steps_averaged_note: str = field("which steps were excluded")
    compilation: CompilationTimes | None = field(
        "what compiling took and saves", null="--compile is off"
    )
    timings_ms: dict[str, Timing] = field("by step, data, forward, backward, optimizer")

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """What is known where another figure is."""
        known = {name for name in value if value[name] is not None}
        follows = [
            ("avg_step_time_ms", "median_step_time_ms"),
            ("samples_per_sec", "tokens_per_sec"),
        ]
        if "avg_step_time_ms" in known:
            follows.append(("model_flops_per_step", "achieved_tflops"))
        for name, other in follows:
            if name in known and other not in known:
                return f"{other}: is null, and {name} is not"
        return None


class Memory(Document):
    peak_mb: float | None = field("MB", null="training did not start")
    average_mb: float | None = field("MB", null="training did not start")
    source: str = field("what was counted")


class Losses(Document):
    first: float | None = field("of the first step", null=NO_STEP)
    final: float | None = field("of the last step", null=NO_STEP)


class StepColumns(Document):
    step: list[int] = field("numbers, from 1")
    loss: list[float | None] = field("mean over the tokens", null=NOT_FINITE)
    time_ms: list[float] = field("of the whole step")
    grad_norm: NotRequired[list[float | None]] = field(
        "with --grad-clip, before clipping", null=NOT_FINITE
    )
    exclusion_reason: list[str | None] = field(
        "why a step is excluded from averages", null="it is included"
    )
    waited_share: list[float | None] = field("of thread time, waiting for a core", null=UNREPORTED)
    longest_wait_share: list[float | None] = field(
        "of the step, for the thread that waited longest", null=UNREPORTED
    )
    lost_share: list[float | None] = field(
        "of the step, that is due to waiting at most", null=UNREPORTED
    )
    disturbed: list[bool | None] = field(
        "whether it waited long enough to be longer", null=UNREPORTED
    )

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """Every column has an entry for every step."""
        return different_lengths(value, "step")


class GpuDisturbance(Document):
    other_processes: int | None = field(
        "on the GPU, the most of before and after the run", null=NO_READING
    )
    memory_in_use_mb: float = field(
        "MB before the run: other processes, and the context of this one"
    )
    clock_mhz: float | None = field("mean, read once a second", null=NO_READING)
    max_clock_mhz: int | None = field("of the GPU's cores", null=NO_READING)
    lowered_by: dict[str, float] | None = field(
        "causes other than the power limit, share of the time", null=NO_READING
    )


class Disturbance(Document):
    """Of several ranks, that of the one that was disturbed most."""

    disturbed: bool | None = field("whether something made it slower", null=NOT_RUN)
    waited_share: float | None = field("of thread time, waiting for a core", null=NOT_RUN)
    longest_wait_share: float | None = field(
        "of the steps, for the thread that waited longest in each", null=NOT_RUN
    )
    steps_disturbed: int | None = field("that waited long enough to be longer", null=NOT_RUN)
    threads: int = field("that PyTorch uses for one operator")
    cores: int = field("that the affinity mask allows")
    load_before: float | None = field(
        "load average of the minute before", null="this system has no load average"
    )
    quota_cores: float | None = field("least CPU quota of the control groups", null="no quota")
    throttled_share: float | None = field(
        "of the quota's periods, those in which it was used up", null="no quota"
    )
    pressure_share: float | None = field(
        "of the time, some process of the machine waited for a core", null=NOT_RUN
    )
    steal_share: float | None = field(
        "of the cores' busy time, taken by other virtual machines", null=NOT_RUN
    )
    switches_per_sec: float | None = field("involuntary context switches", null=NOT_RUN)
    sample_us: float | None = field(
        "microseconds that a sample takes, median, two per step", null=NOT_RUN
    )
    gpu: GpuDisturbance | None = field("of the GPU in use", null="no GPU in use")
    lost_share: float | None = field(
        "of the steps' time, that is due to it at most, sum over ranks", null=NOT_RUN
    )
    reasons: list[str] = field("what disturbed it, with figures")


class NoSyncSteps(Document):
    steps: int = field("of each kind, in turn, after training")
    step_ms: float = field("median of steps as in training")
    no_sync_step_ms: float = field("median of steps that do not reduce gradients")
    difference_ms: float = field("median of pairs: what the reduction of gradients costs a step")
    difference_95_ms: list[float] = field("its 95% interval, by bootstrap over the pairs")
    share: float = field("of step_ms")


class RankFacts(Document):
    rank: int = field("its number")
    host: str = field("name of its machine")
    mean_step_ms: float | None = field("over the averaged steps", null=NO_STEP)
    peak_memory_mb: float = field("MB, as memory.source says")
    disturbance: Disturbance = field("of its steps")


class AuditFinding(Document):
    check: str = field(
        "missing_, zero_ or non_finite_gradient, unmoved_ or unowned_parameter, first_loss,"
        " backward_time, rate"
    )
    detail: str = field("the finding with its figures")
    parameters: NotRequired[list[str]] = field("names, 20 at most; checks of parameters only")


class Audit(Document):
    ok: bool | None = field("whether there is no finding", null="no step was done")
    findings: list[AuditFinding] = field("what is wrong; empty: nothing")
    not_checked: list[dict[str, str]] = field("check, as in a finding, and reason")
    gradient_norms: dict[str, float] = field(
        "of the first step, by part of the model over all layers"
    )
    notes: NotRequired[list[str]] = field(
        "what the precision does to all updates, and is no finding"
    )


class PerformanceSummary(Document):
    status: str = field("completed, interrupted, failed")
    error: str | None = field("one line", null="nothing ended it early")
    config: Settings = field("as in config.json")
    environment: Environment = field("as in config.json")
    training: Progress = field("what was asked for, and how far it came")
    performance: Performance = field("times and rates")
    memory: Memory = field("of one rank")
    loss: Losses = field("mean over the tokens of a step")
    steps: StepColumns = field("a list each, with an entry for every step")
    ranks: list[RankFacts] = field(
        "those that reached the end together; empty: one rank, or none did"
    )
    no_sync: NoSyncSteps | None = field(
        "communication by difference", null="--no-sync-steps was not given"
    )
    disturbance: Disturbance = field("by other processes, the system and the GPU's clocks")
    audit: Audit = field("whether the run trains")


class HeldMemory(Document):
    category: str = field(
        "parameters, gradients, optimizer, frozen (owned by no optimizer), buffers"
    )
    part: str = field("of the model, by module path")
    bytes: int = field("of its tensors, each storage once")
    rank: int = field("whose tensors they are")


class ProgramRun(Document):
    command: str = field("that started it")
    exit_code: int = field("of the program")
    ended_by: str = field("the tool, or itself")
    steps_of: list[str] = field(
        "classes of the optimizers by which its steps were found, or what else was one"
    )
    shortened: str | None = field(
        "why fewer steps were recorded than asked for", null="as many as asked for"
    )
    first_recorded: int = field("number of the first step in the trace, from 1")
    last_recorded: int = field("number of the last one")
    evaluations: int = field("recorded steps with forward passes without gradients")
    ranks_recorded: int = field("that wrote a trace")
    processes_recorded: int = field(
        "that wrote a trace; more than the ranks where they are no ranks of each other"
    )
    world_size: int = field("ranks")
    processes: int = field("that imported PyTorch")
    phases_per_step: dict[str, float] = field("how often each phase begins in a recorded step")
    memory: list[HeldMemory] = field("after the last recorded step")
