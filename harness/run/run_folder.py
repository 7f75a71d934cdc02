"""The folder of a run, and that of its traces."""

from pathlib import Path

from harness.base.console import file_lines
from harness.base.files import files_of_run, make_folder, prepare_folder, write_json
from harness.base.text import tensorboard_command
from harness.instruments.schedule import ProfilerConfig


class RunFolder:
    """--output-dir, or with an instrument --profile-dir; without either nothing is written, and `path` is None.

    Traces have a folder of their own only if both are given.
    """

    def __init__(self, output_dir: str | None, profiling: ProfilerConfig):
        profiles = (profiling.profile_dir or "./pytorch_profiles") if profiling.enabled else None
        self.path = Path(output_dir or profiles) if output_dir or profiles else None
        self.traced = profiling.records_trace
        self.traces = Path(profiling.profile_dir) if profiling.enabled and profiling.profile_dir else self.path

    def prepare(self, rank: int) -> None:
        """Rank 0 moves an earlier run aside.  Raises UserError if a folder cannot be written."""
        if self.path is None:
            return
        if rank != 0:
            make_folder(self.path)  # found now rather than after training: nodes need not share it
            return
        for folder in dict.fromkeys((self.path, self.traces)):
            prepare_folder(folder)

    def write(self, name: str, document: dict | None) -> None:
        if self.path and document:
            write_json(self.path / name, document)

    def lines(self, verbose: bool) -> list[str]:
        """What the run has left, and how to open it."""
        if self.path is None:
            return []
        lines = file_lines(files_of_run(*dict.fromkeys((self.path, self.traces))), verbose)
        # Where there is a trace, a command ends with its answer, which tells this too.
        return lines if self.traced else [*lines, f"TensorBoard: {tensorboard_command(self.path)}"]
