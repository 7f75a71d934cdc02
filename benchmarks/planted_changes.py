"""Are wrong changes of a program told from right ones?  Audits of edits whose effect on training is known.

python3 benchmarks/planted_changes.py [SEEDS]
"""

import sys
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "tests")]

from planted_changes import PROGRAMS, WRONG, audits  # noqa: E402

counts: Counter[tuple[str, str]] = Counter()
for program in PROGRAMS:
    for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
        counts.update(audits(program, seed).items())
for (name, word), n in counts.items():
    print(f"{'wrong' if name in WRONG else 'right':6} {name:26} {word:10} {n}")
