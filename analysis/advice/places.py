"""Where does Perfetto show what a proposal is about?"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.attribution.components import IDLE
from analysis.trace.timeline import Timeline
from harness.base.text import shortened, significant
from harness.schema import Document, field

NAME = 60  # letters of an event's name
APART = ("of the host", "asynchronous")  # process and thread of what has none of the file


class Place(Document):
    trace: str = field("the file")
    began_ms: float = field("after the first event of the file, from where Perfetto counts")
    duration_ms: float = field("of it")
    thread: str = field("process and thread, or the stream of a GPU, as Perfetto calls them")
    event: str = field("its name, or which event a GPU is idle before")


def place_of_longest(timeline: Timeline, slices: pd.DataFrame, shown: np.ndarray) -> Place | None:
    """Of the longest of some slices; None: Perfetto shows none of them.

    shown: [slices], which of them."""
    # Perfetto reads no file of a system profiler.
    shown = shown & (slices["event"] >= 0).to_numpy()
    if timeline.trace.file.command or not shown.any():
        return None
    longest = slices.loc[slices["us"].where(shown).idxmax()]
    if not timeline.on_gpu:
        event = timeline.host.iloc[longest["event"]]
        threads = dict(enumerate(timeline.trace.threads))
        process, thread = threads.get(event["thread"], APART)
        return place_of(timeline, event, f"process {process}, thread {thread}", event["name"])
    event = timeline.gpu.iloc[longest["event"]]
    stream = f"process {event['device']}, stream {event['stream']}"
    if longest["state"] == IDLE:
        return place_of(timeline, longest, stream, f"idle before {event['name']}")
    return place_of(timeline, event, stream, event["name"])


def place_of(timeline: Timeline, interval: pd.Series, thread: str, name: str) -> Place:
    """interval: with start and end, in us."""
    return Place(
        trace=timeline.trace.path.name,
        began_ms=timeline.trace.perfetto_ms(interval["start"]),
        duration_ms=float(interval["end"] - interval["start"]) / 1e3,
        thread=thread,
        event=name,
    )


def place_text(place: Place) -> str:
    """'4,123.456 ms, process 0, stream 7, for 0.312 ms: NAME': how to find an event in Perfetto."""
    name, when = shortened(place.event, NAME), f"{place.began_ms:,.3f} ms, {place.thread}"
    return f"{when}, for {significant(place.duration_ms, most=3)} ms: {name}"
