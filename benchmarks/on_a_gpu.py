#!/usr/bin/env python3
__doc__ = """\
Everything that needs a GPU, the most telling first, on one that is lent for minutes.

    python3 benchmarks/on_a_gpu.py [--minutes 12]       the same command again goes on where it was
    PRETEND_GPU=h100 PYTHONPATH=tests/pretend_gpu python3 benchmarks/on_a_gpu.py --rehearse
                                                        small, without a GPU

on_a_gpu.ini has the commands.  Each runs until it ends or its time is over; then it is killed with
all that it started.  The next one begins while 20 seconds are left.  A command that is done is not
repeated; one that failed is tried again, after those that have not run yet.  Logs are in
on_a_gpu_results_<gpu>/; what is worth keeping, and on_a_gpu.json, which tells what is done, in
benchmarks/results/<gpu>/.  To go on elsewhere, take that folder along.  Ends with 1 if a command
failed.

Besides PyTorch, commands need packages, and a node may have no network.  Whatever lies in
benchmarks/wheelhouse/ and is not installed is used from there.  This fills it, on any machine, for
another one with Python 3.12 (15 MB):

    python3 -m pip download --no-deps --only-binary :all: --python-version 3.12 \\
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \\
        -d benchmarks/wheelhouse msgspec tabulate tqdm jinja2 markupsafe plotly narwhals \\
        packaging flit_core torch-tb-profiler pytest pluggy iniconfig pygments hypothesis \\
        sortedcontainers

Without --no-deps, and with pandas, matplotlib and tensorboard, it holds all but PyTorch and
DeepSpeed (80 MB).
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness import PROJECT
from harness.base.command_line import OneLineParser, number_of, version_of
from harness.base.console import say
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.files import make_folder, write_bytes, write_json
from harness.base.tables import column, text_columns, text_table
from harness.base.text import count_of, read_ini
from harness.machine.rocm import mode_by_units
from harness.run.startup import hand_over, run_command
from workshop.exercise.shell_blocks import duration, last_line, shell

LEAST_S, MOST_BYTES = 20, 4 * 10**6  # of a command, and of a file that is kept
WHEELHOUSE, SITE = (
    Path(__file__).resolve().parent / "wheelhouse",
    Path("on_a_gpu_results_site").absolute(),
)
PLAN = read_ini(Path(__file__).with_suffix(".ini"))
COLUMNS = [*text_columns("command", "status"), column("seconds", "seconds", ",.0f")]


def folder_name(device: dict) -> str:
    """Of the results of a device, as in environment.json: its name, and the mode in which it is a
    part of a card."""
    name, arch = device["name"], device["arch"].partition(":")[0]
    mode = mode_by_units(name, arch, device["compute_units"])
    if mode not in (None, "SPX"):
        name = f"{name} {mode}"
    return re.sub(r"[^a-z0-9.]+", "-", name.lower())


def use_wheels() -> None:
    """Install what is missing and lies in WHEELHOUSE, for this process and those that it starts."""
    make_folder(SITE)
    (
        SITE / "without_deepspeed"
    ).touch()  # launchers look for it in VENV, and then do without DeepSpeed
    os.environ |= {
        "VENV": str(SITE),
        "PYTHONPATH": f"{SITE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    sys.path.insert(1, str(SITE))
    pip = [
        sys.executable,
        *"-m pip install -q --disable-pip-version-check --no-index --no-deps --target".split(),
        SITE,
    ]
    for wheel in (
        one
        for one in sorted(WHEELHOUSE.glob("*.whl"))
        if version_of(one.name.split("-")[0]) is None
    ):
        if subprocess.run([*pip, wheel], capture_output=True).returncode:
            say(f"{wheel.name} cannot be installed")
    hand_over()  # what no command runs without


def run_one(name: str, command: str, limit: float, place: Path, results: Path) -> dict:
    """Run a command until it ends or its time is over, and keep what it leaves,
    also when it is interrupted."""
    shutil.rmtree(place, ignore_errors=True)
    make_folder(place)
    started, log = time.monotonic(), place / "commands.log"
    say(f"{name}: {duration(limit)} at most")
    try:
        with log.open("w") as output, shell(command, place, output) as process:
            try:
                status = f"exit code {code}" if (code := process.wait(limit)) else "ok"
            except subprocess.TimeoutExpired:
                status = f"killed after {duration(limit)}"
    finally:
        for document, stored in zip(
            PLAN[name]["document"].split(), PLAN[name]["stored"].split(), strict=True
        ):
            for path in place.glob(document):
                data = (
                    path.read_bytes()
                    .replace(f"{place}/".encode(), b"")
                    .replace(f"{PROJECT}/".encode(), b"")
                )
                if len(data) <= MOST_BYTES:
                    write_bytes(results / stored, data)
                else:
                    say(f"      {stored}: {len(data):,} bytes are too many to be kept")
    seconds, said = time.monotonic() - started, last_line(log)[:200].replace(f"{PROJECT}/", "")
    say(f"      {status} after {duration(seconds)}: {said}")
    return {
        "command": command.replace(f"{PROJECT}/", ""),
        "status": status,
        "seconds": seconds,
        "last_line": said,
    }


def run(
    commands: dict[str, str], minutes: float, folder: Path, results: Path, environment: dict
) -> None:
    """What has not begun, then what has failed, as far as there is time.  Raises UserError if
    something failed."""
    make_folder(results)
    end, known = time.monotonic() + 60 * minutes, read_document(results / "on_a_gpu.json")
    records = known["commands"] if known else {}
    open_ones = [name for name in commands if records.get(name, {}).get("status") != "ok"]
    for name in sorted(open_ones, key=records.__contains__):
        if (left := end - time.monotonic()) >= LEAST_S:
            limit = min(left, PLAN.getfloat(name, "seconds"))
            records[name] = run_one(name, commands[name], limit, folder / name, results)
            write_json(results / "on_a_gpu.json", {"environment": environment, "commands": records})
    rows = [
        {"status": "not begun"} | records.get(name, {}) | {"command": name} for name in commands
    ]
    say("", *text_table(COLUMNS, rows))
    if failed := [row for row in rows if row["status"] not in ("ok", "not begun")]:
        say("", *(f"{row['command']}: {row['status']}: {row['last_line']}" for row in failed))
        raise UserError(f"{count_of(len(failed), 'command')} failed; logs are in {folder}")


def main() -> None:
    parser = OneLineParser(prog="on_a_gpu.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--minutes",
        type=number_of(float, 0),
        default=12,
        help="that this call may take (%(default)g)",
    )
    parser.add_argument("--rehearse", action="store_true", help="small, on a pretended card")
    args = parser.parse_args()
    if args.rehearse and "PRETEND_GPU" not in os.environ:
        parser.error("--rehearse: needs a pretended card, as tests/pretend_gpu/README.md says")
    use_wheels()
    from studies.engine.device import properties_of
    from studies.engine.isolation import run_in_subprocess_if_gpu

    # In a process of its own: a context in this one would take memory from the commands.
    environment = run_in_subprocess_if_gpu(True, properties_of, "cuda").environment
    environment["command_line"] = environment["command_line"].replace(f"{PROJECT}/", "")
    name, kind = folder_name(environment["device"]), "command"
    folder, results = (
        Path(f"on_a_gpu_results_{name}").absolute(),
        PROJECT / "benchmarks" / "results" / name,
    )
    if args.rehearse:
        kind, results = "rehearsal", folder / "results"
    words = {"project": shlex.quote(str(PROJECT)), "results": shlex.quote(str(results))}
    commands = {
        name: PLAN[name][kind].format(**words) for name in PLAN.sections() if kind in PLAN[name]
    }
    run(
        {name: " ".join(text.split()) for name, text in commands.items()},
        args.minutes,
        folder,
        results,
        environment,
    )


if __name__ == "__main__":
    run_command(main, ["torch"])
