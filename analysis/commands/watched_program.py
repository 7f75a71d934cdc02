"""The answer of a watched run: at its end, or so far."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from analysis.commands.profiled_program import exit_code_of, print_troubles, why_nothing
from analysis.program.watched_process import WatchedProcess, watched_processes
from analysis.program.whole_run import WatchedRun, answer_rows, watch_sections, watched_run
from analysis.report.watched import write_watch_report, write_watch_scalars
from harness.base.console import file_lines, say
from harness.base.errors import UserError
from harness.base.files import write_json
from harness.base.sections import as_text
from harness.base.tables import answer
from harness.program.command import Ended

WHOLE = ("Headline", "Read on")
OPTIONAL = ("Starts", "Ranks")


def explain_watch(
    ended: Ended, command: Sequence[str], settings: dict, folder: Path, verbose: bool
) -> int:
    """Write the documents and print the answer; returns the exit code of the tool."""
    failed = [process for process in ended.processes if process["state"] == "failed"]
    ran_out = [
        process["out_of_memory"] for process in ended.processes if "out_of_memory" in process
    ]
    print_troubles(failed, ran_out)
    processes = watched_processes(folder)
    if not processes:
        raise UserError(why_nothing(ended, settings, bool(failed)), exit_code_of(ended))
    run, files = written(command, folder, processes)
    files += write_watch_scalars(folder, run)
    if verbose:
        for section in watch_sections(run.document):
            say(*as_text(section))
    say("", *file_lines(files, verbose), "", *answer_of(run, folder))
    return exit_code_of(ended)


def explain_so_far(command: Sequence[str], folder: Path) -> None:
    """While the program runs: what its processes have written until now."""
    processes = watched_processes(folder)
    if not processes:
        say("No step of an optimizer so far: none is timed before the second")
        return
    run, _ = written(command, folder, processes)
    say(*answer_of(run, folder))


def written(
    command: Sequence[str], folder: Path, processes: Sequence[WatchedProcess]
) -> tuple[WatchedRun, list[Path]]:
    run = watched_run(shlex.join(command), processes)
    document = folder / "watch.json"
    write_json(document, run.document)
    return run, [document, write_watch_report(folder, run)]


def answer_of(run: WatchedRun, folder: Path) -> list[str]:
    return answer(answer_rows(run.document, folder / "report.html"), whole=WHOLE, optional=OPTIONAL)
