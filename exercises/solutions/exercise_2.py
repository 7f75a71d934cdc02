"""The peak of a snapshot of memory, and which lines of the program held it."""

from collections import Counter
from pathlib import Path


def at_peak(events):
    """(bytes, {'train.py:77': bytes, ...}): the most that the recorded allocations held at once,
    and by which line of the program they were made."""
    held = {}  # size and line by address
    now, peak = 0, 0
    at_the_peak = {}
    for event in events:
        if event["action"] == "alloc":
            held[event["addr"]] = (event["size"], line_of(event["frames"]))
            now += event["size"]
        elif event["action"] == "free_completed" and event["addr"] in held:
            size, _ = held.pop(event["addr"])
            now -= size
        if now > peak:
            peak, at_the_peak = now, dict(held)
    lines = Counter()
    for size, line in at_the_peak.values():
        lines[line] += size
    return peak, dict(lines)


def line_of(frames):
    """The innermost frame that is not of a library."""
    for frame in frames:
        if "site-packages" not in frame["filename"] and "dist-packages" not in frame["filename"]:
            return f"{Path(frame['filename']).name}:{frame['line']}"
    return None
