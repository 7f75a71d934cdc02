"""What the user sees while a command runs: lines from rank 0, progress bars for long operations."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

RULE = "=" * 42
FEW = 3  # files that are named without --verbose


def is_first_rank() -> bool:
    """Under torchrun only rank 0 prints, and writes the files that all ranks share."""
    return os.environ.get("RANK", "0") == "0"


def world_size_of_run() -> int:
    """Processes of this run, as torchrun or srun tells each of them."""
    return int(os.environ.get("WORLD_SIZE", 1))


def say(*lines: str) -> None:
    """Print for the user."""
    if lines and is_first_rank():
        print(*lines, sep="\n", flush=True)


def file_lines(files: Sequence[Path], verbose: bool) -> list[str]:
    """What a command has written: each file, or of many where they are."""
    if verbose or len(files) <= FEW:
        return ["Files:", *(f"  {file}" for file in files)]
    folder = os.path.commonpath([file.parent for file in files])
    return [f"Files: {len(files)} in {folder}/; docs/files.md says what each of them holds"]


def progress_bar(
    description: str, iterable: Iterable | None = None, total: int | None = None, unit: str = "it"
):
    """tqdm on standard error, for work of more than ten seconds; hidden if that is no terminal."""
    from tqdm import tqdm

    shown = None if is_first_rank() else True  # tqdm: None hides the bar if there is no terminal
    options = {"leave": False, "dynamic_ncols": True, "unit": unit, "unit_scale": unit == "B"}
    return tqdm(iterable, desc=description, total=total, disable=shown, **options)
