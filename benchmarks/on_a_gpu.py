#!/usr/bin/env python3
"""Half an hour of a GPU: everything that these pages leave open without one, the most telling first.

    python3 benchmarks/on_a_gpu.py                      all pieces, in 25 minutes
    python3 benchmarks/on_a_gpu.py --minutes 9          as many as fit; the same command again does the rest
    python3 benchmarks/on_a_gpu.py --piece sizes        this one, also when the 25 minutes are over
    PRETEND_GPU=h100 PYTHONPATH=tests/pretend_gpu python3 benchmarks/on_a_gpu.py --rehearse       small, without a GPU

Besides PyTorch, commands need packages, and a node may have no network.  Whatever lies in benchmarks/wheelhouse/ and is
not installed is used from there.  This fills it, on any machine, for another one with Python 3.12 (15 MB):

    python3 -m pip download --no-deps --only-binary :all: --python-version 3.12 \\
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 -d benchmarks/wheelhouse \\
        msgspec tabulate tqdm jinja2 markupsafe plotly narwhals packaging flit_core torch-tb-profiler \\
        pytest pluggy iniconfig pygments hypothesis sortedcontainers

Without --no-deps, and with pandas, matplotlib and tensorboard, it holds all but PyTorch and DeepSpeed (80 MB).

on_a_gpu.ini has the pieces.  Each is a command, or one for each size, precision or exercise: a process of its own,
which is killed with all that it started when its time is over.  A command begins only if its share of the piece's
seconds is left, without those of other pieces that have not begun.  So no piece takes the time of another; what one
leaves, later ones may use, nine minutes each at most.  A command that is done is not repeated; one that failed is tried
again by the next call, after those that have not run yet.

Work and logs are in on_a_gpu_results_<gpu>/.  What is worth keeping is in benchmarks/results/<gpu>/: the documents of
the commands, the traces in an archive of 16 MB at most, on_a_gpu.json, which tells what is done, and summary.md, which
names what contradicts a prediction.  To go on elsewhere, take that folder along.  Ends with 1 if a command failed.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness import PROJECT
from harness.base.command_line import OneLineParser, version_of
from harness.base.console import say
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.files import make_folder, write_bytes, write_json, written_whole
from harness.base.tables import column, markdown_table, text_columns
from harness.base.text import read_ini
from harness.run.startup import hand_over, run_command
from workshop.exercise.results import machine
from workshop.exercise.shell_blocks import duration, last_line, shell

TOTAL_S, PIECE_S, ARCHIVE_BYTES = 25 * 60, 9 * 60, 16 * 10**6
DONE, PYTHON = ("ok", "does not fit"), f"exec {shlex.quote(sys.executable)}"
WHEELHOUSE, SITE = Path(__file__).resolve().parent / "wheelhouse", Path("on_a_gpu_results_site").absolute()
PLAN = read_ini(Path(__file__).with_suffix(".ini"))
PIECES = {name: PLAN.getint(name, "seconds") for name in PLAN.sections() if "seconds" in PLAN[name]}
OF_A_ROW = "size implementation seq_len precision dtype flags test".split()
OF_SIZES = "step_ms least_ms achieved_tflops mfu_percent predicted_peak_bytes peak_bytes reserved_bytes".split()


def use_wheels() -> None:
    """Install what is missing and lies in WHEELHOUSE, for this process and those that it starts."""
    make_folder(SITE)
    (SITE / "without_deepspeed").touch()  # launchers look for it in VENV, and then do without DeepSpeed
    os.environ |= {"VENV": str(SITE), "PYTHONPATH": f"{SITE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    sys.path.insert(1, str(SITE))
    pip = [sys.executable, *"-m pip install -q --disable-pip-version-check --no-index --no-deps --target".split(), SITE]
    for wheel in (one for one in sorted(WHEELHOUSE.glob("*.whl")) if version_of(one.name.split("-")[0]) is None):
        if (done := subprocess.run([*pip, wheel], capture_output=True, text=True)).returncode:
            say(f"{wheel.name} cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    hand_over()  # what no command runs without


class Pieces:
    """The commands and their records, what is run next, and what came out."""

    def __init__(self, environment: dict, words: dict[str, str], folder: Path, results: Path):
        self.environment, self.words, self.folder, self.results = environment, words, folder, results
        make_folder(results)
        known = read_document(results / "on_a_gpu.json") or {"commands": []}
        self.records = {(record["piece"], record["one"]): record for record in known["commands"]}
        self.commands = {piece: (words.get(PLAN[piece]["each"]) or "all").split() for piece in PIECES}

    def spent(self, *pieces: str) -> float:
        return sum(record["seconds"] for record in self.records.values() if record["piece"] in pieces)

    def run(self, chosen: str | None, minutes: float) -> None:
        """What has not begun, then what has failed, as far as there is time."""
        end, before = time.monotonic() + 60 * minutes, {piece: self.spent(piece) for piece in PIECES}
        done = {pair for pair, record in self.records.items() if record["status"] in DONE}
        every = [(piece, one) for piece in PIECES if chosen in (None, piece) for one in self.commands[piece]]
        for piece, one in sorted((pair for pair in every if pair not in done), key=self.records.__contains__):
            later = sum(PIECES[name] for name in PIECES if name != piece and not self.spent(name))
            left = TOTAL_S if chosen else TOTAL_S - self.spent(*PIECES) - later
            left = min(left, end - time.monotonic(), PIECE_S + before[piece] - self.spent(piece))
            if left >= (share := PIECES[piece] / len(self.commands[piece])):
                limit = min(left, max(60, 4 * share))  # what hangs leaves some to the others
                say(f"{piece} {one}: {duration(limit)} at most, {duration(end - time.monotonic())} left")
                self.records[piece, one] = {"piece": piece, "one": one} | self.run_one(piece, one, limit)
                document = {"environment": self.environment, "commands": [*self.records.values()]}
                write_json(self.results / "on_a_gpu.json", document)

    def run_one(self, piece: str, one: str, limit: float) -> dict:
        """Run a command until it ends or its time is over, and keep what it leaves."""
        place, started = self.folder / piece / one, time.monotonic()
        shutil.rmtree(place, ignore_errors=True)
        make_folder(place)
        command = " ".join(PLAN[piece]["command"].format(one=one, **self.words).split())
        with (place / "commands.log").open("w") as log, shell(f"{PYTHON} {command}", place, log) as process:
            try:
                status = f"exit code {code}" if (code := process.wait(limit)) else "ok"
            except subprocess.TimeoutExpired:
                status = f"killed after {duration(limit)}"
        said, seconds = last_line(place / "commands.log")[:200], time.monotonic() - started
        status = "does not fit" if said.endswith("--force trains anyway") else status
        say(f"      {status} after {duration(seconds)}: {said}")
        if (document := place / PLAN[piece]["document"].format(one=one)).exists():
            text = document.read_text().replace(f"{PROJECT}/", "")
            text = re.sub(r'("timeline": \{)[^}]*', r"\1", text)  # megabytes
            write_bytes(self.stored(piece, one), text.encode())
        return {"status": status, "seconds": seconds, "said": said, "command": command.replace(f"{PROJECT}/", "")}

    def stored(self, piece: str, one: str) -> Path:
        return self.results / PLAN[piece]["stored"].format(one=one)

    def rows(self) -> dict[str, list[dict]]:
        """What was measured, beside what was predicted, by piece."""
        rows: dict[str, list[dict]] = {}
        for piece, ones in self.commands.items():
            about, paths = {"precision": self.words["narrow"]}, [(one, self.stored(piece, one)) for one in ones]
            rows[piece] = [row for one, path in paths if path.exists() for row in rows_in(path, about | {"size": one})]
        for row in rows["sizes"]:
            for other in (*rows["bounds"], *rows["traces"], *rows["peaks"]):
                if all(other.get(name, row[name]) == row[name] for name in ("size", "precision")):
                    row |= other | row
            if peak := row.get("peak_tflops"):
                row["mfu_percent"] = 100 * (row["achieved_tflops"] or 0) / peak
        return rows

    def summary(self) -> list[str]:
        """summary.md, and traces.tar.gz with the smallest traces, as far as there is room.  Returns what failed."""
        records = [record for record in self.records.values() if record["status"] not in DONE]
        failed = [f"{one['piece']} {one['one']}: {one['status']}, {one['said']}" for one in records]
        rows, environment, room, left_out = self.rows(), self.environment, ARCHIVE_BYTES, []
        if traces := [*self.folder.glob("traces/*/out/trace_step_*")]:  # else what is there is of another machine
            with written_whole(self.results / "traces.tar.gz") as file, tarfile.open(fileobj=file, mode="w:gz") as kept:
                for trace in sorted(traces, key=lambda path: path.stat().st_size):
                    name, room = f"{trace.parts[-3]}_{trace.name}", room - trace.stat().st_size - 2048
                    kept.add(trace, name) if room > 0 else left_out.append(name)
        columns = [*text_columns("piece", "question"), column("seconds", "seconds", ",.0f"), *text_columns("run")]
        of_sizes = [*text_columns("size", "precision", "status"), *(column(name, name, "~9") for name in OF_SIZES)]
        pieces = []
        for piece, ones in self.commands.items():
            status = [self.records[piece, one]["status"] in DONE for one in ones if (piece, one) in self.records]
            text = f"{sum(status)} of {len(ones)} ok, {len(status) - sum(status)} failed"
            pieces.append({**PLAN[piece], "piece": piece, "seconds": self.spent(piece), "run": text})
        lines = [f"# {machine(environment)}", "", f"`{environment['command_line']}`", ""]
        absent = ", ".join(name for name, version in environment["packages"].items() if not version)
        missing = f"Not installed: {absent or 'nothing'}; not in traces.tar.gz: {', '.join(left_out) or 'nothing'}."
        lines += [missing, "", "## Pieces", ""]
        lines += [*markdown_table(columns, pieces), "", "## Sizes", "", *markdown_table(of_sizes, rows["sizes"]), ""]
        for title, found in {"What failed": failed, "What contradicts a prediction": contradictions(rows)}.items():
            lines += [f"## {title}", "", *(f"- {line}" for line in found or ["Nothing that ran."]), ""]
        write_bytes(self.results / "summary.md", "\n".join(lines).encode())
        say("", *lines)
        return failed


def rows_in(path: Path, about: dict) -> list[dict]:
    """Of a document that a command has left: its rows, or what of it is compared."""
    if path.suffix == ".log":
        return [{"test": "failed", "not_the_same": one} for one in re.findall("^FAILED (.+)", path.read_text(), re.M)]
    document = read_document(path)
    if known := document.get("efficiency_metrics"):
        row = {f"{kind}_{one['kind']}": one["rate"] for kind in ("peaks", "bandwidth_peaks") for one in known[kind]}
        return [row | {"precision": known["precision"], "peak_tflops": (known["device_peak_flops"] or 0) / 1e12}]
    if steps := document.get("allocator"):
        live, rounding, free, *_ = (step["bytes"] for step in steps)
        row = {"live_bytes": live, "allocated_bytes": live + rounding, "reserved_bytes": live + rounding + free}
        return [about | row | {"predicted_bytes": document["predicted"] and document["predicted"]["peak_bytes"]}]
    return document.get("rows", [about | {"least_ms": document.get("step_time_lower_bound_ms")}])


def contradictions(rows: dict[str, list[dict]]) -> list[str]:
    found = []
    for name, text in PLAN["checks"].items():
        piece, measured, predicted, *ends = text.split()
        for row in (row for row in rows[piece] if row.get(measured) and row.get(predicted)):
            if not float(ends[0]) <= (ratio := row[measured] / row[predicted]) <= float(ends[1]):
                found.append((row, f"{name} is {ratio:.4g}, not {' to '.join(ends)}"))
    for row in (row for several in rows.values() for row in several):
        memory = row.get("status") == "oom" and "out of memory, though predicted to fit"
        found += [(row, why) for why in (row.get("not_the_same"), memory) if why]
    return [f"{' '.join(str(row[name]) for name in OF_A_ROW if row.get(name))}: {text}" for row, text in found]


def main() -> None:
    parser = OneLineParser(prog="on_a_gpu.py", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=TOTAL_S / 60, help="that this call may take (%(default)g)")
    parser.add_argument("--piece", choices=PIECES, help="only this one")
    parser.add_argument("--rehearse", action="store_true", help="small, on a pretended card")
    args = parser.parse_args()
    if args.rehearse and "PRETEND_GPU" not in os.environ:
        parser.error("--rehearse: needs a pretended card, as tests/pretend_gpu/README.md says")
    use_wheels()
    from studies.engine.device import properties_of
    from studies.engine.isolation import run_in_subprocess_if_gpu

    # In a process of its own: a context in this one would take memory from the commands.
    device = run_in_subprocess_if_gpu(True, properties_of, "cuda")
    words = {**PLAN["full"], **(PLAN["small"] if args.rehearse else {}), "project": shlex.quote(str(PROJECT))}
    has = [precision for precision in words["precisions"].split() if precision not in device.unsupported]
    words |= {"precisions": " ".join(has), "narrow": has[-1]}
    name = re.sub(r"[^a-z0-9.]+", "-", device.name.lower())
    folder = Path(f"on_a_gpu_results_{name}").absolute()
    results = folder / "results" if args.rehearse else PROJECT / "benchmarks" / "results" / name
    pieces = Pieces(device.environment, words, folder, results)
    try:
        pieces.run(args.piece, args.minutes)
    finally:
        failed = pieces.summary()
    if failed:
        raise UserError(f"{len(failed)} commands failed: see {results / 'summary.md'}")


if __name__ == "__main__":
    run_command(main, ["torch"])
