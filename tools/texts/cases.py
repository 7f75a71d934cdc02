"""The cases of docs/cases.md: their commands, and what these printed on a named machine."""

from typing import NamedTuple

from tools.texts.numbers import text_block
from workshop.exercise.results import stored_file

# What is run, in the project's folder.  {out}: a folder for the results.
PROFILE = "{python} profile_program.py --output-dir {out} --"
WATCH = "{python} profile_program.py --watch --output-dir {out} --"
PROVE = "{python} prove_changes.py --audit-only --try compile --output-dir {out} --"
RANKS = "-m torch.distributed.run --nproc-per-node 2"
ON_RANKS = f"{PROFILE} {RANKS}"
SNAPSHOT = "benchmarks/results/nvidia-h200/memory_snapshot_step.pickle.gz"


class Case(NamedTuple):
    folder: str  # of the results, as a reader types it
    labels: tuple[str, ...]  # of the lines that the page shows, with what continues them
    commands: tuple[str, ...]


def mended(labels: tuple[str, ...], how: str, name: str) -> Case:
    """A program of examples/cases as it is, and with its fault mended."""
    command, kind = f"{how} examples/cases/{name}.py", "proof" if how == PROVE else "program"
    return Case(f"{kind}_{name}", labels, (command, f"{command} fixed"))


CASES = {
    name: mended(labels, how, name)
    for name, labels, how in (
        ("checkpoint_without_gradients", ("Audit:", "Headline:"), PROFILE),
        ("compiled_other_gradients", ("Differs:", "Passes:"), PROVE),
        ("no_sync_without_effect", ("Audit:",), ON_RANKS),
        ("losses_kept", ("Headline:", "Steps:"), WATCH),
        ("rare_collections", ("Headline:", "Steps:"), WATCH),
    )
}
CASES["peak_of_a_snapshot"] = Case(
    "analysis_snapshot",
    ("Headline:", "At the peak:", "Largest lines:"),
    (f"{{python}} analyze_trace.py {SNAPSHOT} --output-dir {{out}}",),
)


# Of exercise 12: ranks that train different models, and the program mended.
TWO_RANKS = "exercises/audit/two_ranks.py"
CASES["two_ranks"] = Case(
    "exercise12_ranks",
    ("rank ", "Audit:"),
    tuple(
        f"{how} {program}"
        for program in (TWO_RANKS, f"{TWO_RANKS} fixed")
        for how in (f"{{python}} {RANKS}", ON_RANKS)
    ),
)
# Of exercise 13: a change that pays where tables are large.
CASES["optimizer_of_tables"] = Case(
    "proof_tables",
    ("Helps:", "No verdict:"),
    (
        "{python} prove_changes.py --try fused,bf16 --output-dir {out} --"
        " examples/train_tables.py 300",
    ),
)


def as_typed(command: str, case: Case) -> str:
    """A command as a reader types it."""
    return command.format(python="python3", out=case.folder)


def log_name(case: str) -> str:
    """Of what its commands printed, in the folder of a machine."""
    return f"cases/{case}.log"


def answer_of(printed: str, labels: tuple[str, ...]) -> list[str]:
    """Of what a command printed, the lines that the page shows."""
    lines, shows = [], False
    for line in printed.splitlines():
        shows = line.startswith(labels) or (shows and line.startswith("    "))
        if shows:
            lines.append(line)
    return lines


def case(name: str) -> str:
    """The commands of a case and what they printed on the machine whose results are stored, which
    the last line of the file names."""
    *lines, where = stored_file(log_name(name)).read_text().splitlines()
    return f"{text_block(lines)}\n*{where}.*"
