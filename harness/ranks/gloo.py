"""When do gloo's threads rest?  A profiler must not stop while one still notes the end of a
collective."""

import time
from pathlib import Path

THREADS = "pt_gloo"  # what PyTorch calls the threads in which gloo works begins so
ASLEEP = "S"
LONGEST_WAIT_S = 1.0
BETWEEN_LOOKS_S = 0.0005


def wait_for_gloo() -> None:
    """Return once all threads in which gloo works are asleep, after a second at most.

    Whoever waits for a collective goes on before gloo's thread has noted its end.  A profiler that
    stops in between frees what the thread then writes to, and the process dies of its corrupted
    memory.  Where the system does not tell what threads do, as only Linux does, it returns at once.
    """
    until = time.monotonic() + LONGEST_WAIT_S
    while time.monotonic() < until and not all_asleep():
        time.sleep(BETWEEN_LOOKS_S)


def all_asleep() -> bool:
    for thread in Path("/proc/self/task").glob("*"):
        try:
            name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        if name.startswith(THREADS) and rest.split()[0] != ASLEEP:
            return False
    return True
