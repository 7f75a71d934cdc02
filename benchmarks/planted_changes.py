"""Are wrong changes of a program told from right ones?  Audits of edits whose effect on training is known.

python3 benchmarks/planted_changes.py [--programs N] [--seeds N]
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]

from planted_changes import PROGRAMS, RIGHT, WRONG, edited  # noqa: E402

from analysis.commands.proof import Proof  # noqa: E402
from analysis.comparison.training import apart, trains  # noqa: E402
from harness.program.hooks.changes import ROUNDING  # noqa: E402
from harness.program.trials import trials_of  # noqa: E402


def audits(source: str) -> dict[str, str]:
    """What the audit says of each edit of a program, in the working directory."""
    Path("train.py").write_text(source)
    with trials_of([sys.executable, "train.py"], dict(os.environ), 100, keep=True) as trials:
        proof = Proof(trials, [], 1, audit_only=True)
        _, yardsticks = proof.yardsticks()
        said = {}
        for name, edits in (WRONG | RIGHT).items():
            Path("train.py").write_text(edited(source, edits))
            trial = trials.run(audit=True)
            said[name] = trial.error or trains(apart(trial.found, proof.plain.found), yardsticks, ROUNDING)
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=len(PROGRAMS))
    parser.add_argument("--seeds", type=int, default=3)
    settings = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    for source in [*PROGRAMS.values()][: settings.programs]:
        for seed in range(settings.seeds):
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                counts.update(audits(source.replace("SEED", str(seed))).items())
                os.chdir(PROJECT)
    for name in WRONG | RIGHT:
        said = ", ".join(f"{word} {n}" for (edit, word), n in counts.items() if edit == name)
        print(f"{'wrong' if name in WRONG else 'right':6} {name:26} {said}")


if __name__ == "__main__":
    main()
