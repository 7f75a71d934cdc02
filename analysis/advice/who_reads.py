"""The run that was traced: who reads its answer, and which command records it again?"""

import shlex

from analysis.vocabulary.words import Reader
from harness import PROJECT
from harness.base.text import path_from_here
from harness.model.optimizations import ANY_MODEL


class TracedRun:
    """The run that was traced, as its performance_summary.json tells of it, if there is one."""

    def __init__(self, summary: dict | None):
        self.summary = summary
        config = summary.get("config", {}) if summary else {}
        self.model: dict = config.get("model", {})
        self.training: dict = config.get("training", {})
        self.is_workload_file = "file" in self.model  # --workload: other settings are in it
        self.is_program = "program" in self.model  # of profile_program.py

    @property
    def reader(self) -> Reader:
        """Without a summary, only the file is known."""
        if self.summary is None:
            return Reader.FILE_ONLY
        if self.is_program or self.is_workload_file:
            return Reader.OWN_PROGRAM
        return Reader.OUR_MODEL

    # ---- Its command -----------------------------------------------------------------------------

    @property
    def command(self) -> str | None:
        """The command that ran what was recorded, as it can be typed again; None: nothing tells
        it."""
        line = self.summary and self.summary["environment"].get("command_line")
        if not line:
            return None
        # --system-profiler is set by its launcher.
        return shlex.join(word for word in shlex.split(line) if word != "--system-profiler")

    def has_flag(self, flag: str) -> bool:
        """Whether its command has this flag, '--batch-size 16'."""
        if self.reader == Reader.OUR_MODEL:
            return True
        name = flag.partition(" ")[0].strip("-").replace("-", "_")
        return self.is_workload_file and name in ANY_MODEL and name in self.training

    def with_flag(self, flag: str) -> str | None:
        """Its command with this flag in addition; None: it takes none."""
        if not self.command or not self.has_flag(flag):
            return None
        words, name = shlex.split(self.command), flag.partition(" ")[0]
        if name in words:  # with the value that it had
            at = words.index(name)
            del words[at : at + len(flag.split())]
        return f"{shlex.join(words)} {flag}"

    def recording_again(self, flag: str) -> str | None:
        """The command that records it again with this flag, which our scripts and
        profile_program.py both have; None: nothing tells it."""
        if self.command is None:
            return None
        if self.is_program:
            script = path_from_here(PROJECT / "profile_program.py")
            return f"python3 {script} {flag} -- {self.command}"
        return f"{self.command} {flag}"

    # ---- What it ran on --------------------------------------------------------------------------

    @property
    def cores(self) -> int | None:
        """What the affinity mask and a quota allow; the machine's, where that was not measured."""
        cores = self._disturbance.get("cores") or self._cpu.get("logical_cores")
        quota = self._disturbance.get("quota_cores")
        if cores and quota:
            return max(1, min(cores, int(quota)))
        return cores

    @property
    def threads(self) -> int | None:
        """Of the training."""
        return self._disturbance.get("threads") or self._cpu.get("torch_threads")

    @property
    def _cpu(self) -> dict:
        environment = self.summary and self.summary.get("environment")
        return (environment and environment.get("cpu")) or {}

    @property
    def _disturbance(self) -> dict:
        return (self.summary and self.summary.get("disturbance")) or {}
