__doc__ = """\
Store the results of a machine that the documentation quotes: benchmarks/results/NAME, and \
exercises/pictures.

python3 run_exercise.py all --extra --output-dir FOLDER
(cd FOLDER && ../run_baseline.sh)
python3 tools/record_results.py FOLDER NAME

Of exercises that were run alone, `record_results.py FOLDER NAME N ...` stores the answers and logs.
"""

import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.run.startup import run_command

# Not kept of a log: steps, and what a program prints that is stopped because it stays open.
NOISE = re.compile(r"^Step \d+/\d+: [^\n]*\n|^\$ # stays open.*?(?=^\$ )", re.M | re.S)
PICTURES = (
    "exercise_2/memory_hotspots/memory_timeline.png",
    "exercise_3/exercise3_flops/roofline.png",
    "exercise_9/exercise9_timing/timing_study.png",
)


def main() -> None:
    from harness import PROJECT
    from harness.base.command_line import OneLineParser
    from harness.base.console import say
    from harness.base.errors import UserError
    from workshop.exercise.page import exercises

    parser = OneLineParser(prog="record_results.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, help="where `run_exercise.py all` and ./run_baseline.sh wrote"
    )
    parser.add_argument("name", help="of the machine, such as cpu-amd-epyc-2-threads")
    parser.add_argument(
        "numbers", nargs="*", type=int, metavar="N", help="exercises (all of them, and the rest)"
    )
    args = parser.parse_args()
    names = {
        f"exercise_{number}/answers_{number}.json": f"exercise_{number}.json"
        for number in args.numbers or exercises()
    }
    if not args.numbers:
        names["baseline_results_*/performance_summary.json"] = "run_baseline.json"
        names["baseline_results_*/training_output.log"] = "run_baseline.log"
    pictures = () if args.numbers else PICTURES
    found = {pattern: sorted(args.folder.glob(pattern)) for pattern in (*names, *pictures)}
    missing = [pattern for pattern, files in found.items() if not files]
    if missing:
        raise UserError(f"{args.folder}: has no {', '.join(missing)}")
    for number in args.numbers or exercises():
        refuse_disturbed(args.folder / f"exercise_{number}", exercises()[number])
    for pattern, name in names.items():
        target = place_for(args.name, name)
        # Launchers call scripts by their whole path.
        target.write_text(found[pattern][-1].read_text().replace(f"{PROJECT}/", ""))
        say(f"{found[pattern][-1]} -> {target.relative_to(PROJECT)}")
    for name in pictures:
        target = PROJECT / "exercises" / "pictures" / Path(name).name
        shutil.copyfile(found[name][-1], target)
        say(f"{found[name][-1]} -> {target.relative_to(PROJECT)}")
    for number in args.numbers or exercises():
        log = args.folder / f"exercise_{number}" / "commands.log"
        if log.is_file():
            store_log(log, place_for(args.name, f"exercise_{number}.log"))


def refuse_disturbed(folder: Path, exercise) -> None:
    """What is stored is quoted as proof.  exercise: an Exercise."""
    from harness.base.errors import UserError
    from workshop.exercise.results import Results
    from workshop.worksheets.worksheet import answers

    parts = [part for part in (exercise.core, exercise.extra) if part]
    known = answers(Results(folder, exercise), parts)
    disturbed = [name for name, answer in known.items() if answer.is_disturbed]
    if disturbed:
        raise UserError(
            f"{folder}: other programs disturbed the runs of {', '.join(disturbed)}; run it again"
        )


def place_for(machine: str, name: str) -> Path:
    """Where a file of a machine's results is stored.  Of CPUs the documentation quotes one: the
    file of another one goes."""
    from workshop.exercise.results import RESULTS, stored_file

    place, quoted = RESULTS / machine / name, stored_file(name)
    if machine.startswith("cpu-") and quoted is not None and quoted != place:
        quoted.unlink()
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def store_log(log: Path, target: Path) -> None:
    """What the commands of an exercise printed, for the sample output on its page."""
    from harness import PROJECT

    target.write_text(NOISE.sub("", log.read_text().replace(f"{PROJECT}/", "")))


if __name__ == "__main__":
    run_command(main)
