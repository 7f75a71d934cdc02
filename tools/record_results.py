__doc__ = """\
Store the results of a machine that the documentation quotes: benchmarks/results/NAME, and \
exercises/pictures.

python3 run_exercise.py all --output-dir FOLDER
(cd FOLDER && ../run_baseline.sh)
python3 tools/record_results.py FOLDER NAME
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
    args = parser.parse_args()
    results, pictures = (
        PROJECT / "benchmarks" / "results" / args.name,
        PROJECT / "exercises" / "pictures",
    )
    targets = {
        f"exercise_{number}/answers_{number}.json": results / f"exercise_{number}.json"
        for number in exercises()
    }
    targets["baseline_results_*/performance_summary.json"] = results / "run_baseline.json"
    targets["baseline_results_*/training_output.log"] = results / "run_baseline.log"
    targets |= {name: pictures / Path(name).name for name in PICTURES}
    found = {pattern: sorted(args.folder.glob(pattern)) for pattern in targets}
    missing = [pattern for pattern, files in found.items() if not files]
    if missing:
        raise UserError(f"{args.folder}: has no {', '.join(missing)}")
    results.mkdir(parents=True, exist_ok=True)
    for pattern, target in targets.items():
        shutil.copyfile(found[pattern][-1], target)
        if target.suffix in (".json", ".log"):  # launchers call scripts by their whole path
            target.write_text(target.read_text().replace(f"{PROJECT}/", ""))
        say(f"{found[pattern][-1]} -> {target.relative_to(PROJECT)}")
    for number in exercises():
        if (log := args.folder / f"exercise_{number}" / "commands.log").is_file():
            store_log(log, results / f"exercise_{number}.log")


def store_log(log: Path, target: Path) -> None:
    """What the commands of an exercise printed, for the sample output on its page."""
    from harness import PROJECT

    target.write_text(NOISE.sub("", log.read_text().replace(f"{PROJECT}/", "")))


if __name__ == "__main__":
    run_command(main)
