"""Are wrong changes of a program told from right ones, and is nothing ever said to help?  Audits of
edits whose effect on training is known, and turns in which nothing is changed.

python3 benchmarks/planted_changes.py [SEEDS]
"""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness.run.startup import begin_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

from tools.planted_changes import PROGRAMS, WRONG, audits, contests_of_nothing


def main() -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for program in PROGRAMS:
        for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
            counts.update(audits(program, seed).items())
    for (name, word), n in counts.items():
        print(f"{'wrong' if name in WRONG else 'right':6} {name:26} {word:10} {n}")
    contests = [word for program in list(PROGRAMS)[:6:2] for word in contests_of_nothing(program)]
    for word, n in Counter(contests).items():
        print(f"nothing changed: {word} {n}")


if __name__ == "__main__":
    main()
