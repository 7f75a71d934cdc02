"""Where a proof is: a line as each run begins and ends, and while it lasts."""

import contextlib
import threading
import time
from collections.abc import Iterator

from harness.base.console import say

TELL_S = 10.0  # between two lines of a run that lasts


@contextlib.contextmanager
def told_meanwhile(what: str, about_s: float, left: str) -> Iterator[None]:
    """In this block what runs is told every TELL_S seconds.

    about_s: how long it is expected to take, 0 where nothing tells; left: what follows, '' if
    nothing does.
    """
    is_over = threading.Event()
    teller = threading.Thread(target=_tell, args=(is_over, what, about_s, left), daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()


def _tell(is_over: threading.Event, what: str, about_s: float, left: str) -> None:
    began, began_s = time.strftime("%H:%M:%S"), time.monotonic()
    expected = f" of about {about_s:,.0f} s" if about_s else ""
    follows = f"; then {left}" if left else ""
    while not is_over.wait(TELL_S):
        lasted_s = time.monotonic() - began_s
        say(f"{what}: runs since {began}, {lasted_s:,.0f} s{expected}{follows}")
