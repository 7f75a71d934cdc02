"""Python processes that start warm: a fork of one that has imported PyTorch, where a new one would
import it for a second or two of a core.

`start_server` makes a folder with a `python3` (client.py) that stands for the interpreter of the
tests.  It hands what it was started with, its open files among it, to the server (server.py), waits
for the fork that is made there, passes signals on to it, and ends as it ended.  A start that could
differ is one from nothing: with other flags of the interpreter, code in the command line, hooks in
its start, or environment variables that libraries read while they are imported.  `WARM_PYTHON=no`
in the environment makes all starts such.
"""

import base64
import os
import socket
import subprocess
import types
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
PIXEL = base64.b64decode(  # a PNG of one, in the place of figures that nobody looks at
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJ"
    "RU5ErkJggg=="
)


def measure_briefly(measuring: types.ModuleType) -> None:
    """The rates of this machine, as nothing disturbed it: beside tests something does, and each
    command that asks would measure them again, for seconds of a core."""
    gpu = {"other_processes": 0, "lowered_by": {}}
    quiet = {"disturbed": None, "disturbed_reason": "tests run beside each other", "gpu": gpu}
    measuring.SECONDS = 0.02
    measuring.watch = lambda device_type, measure: (measure(), quiet)


def start_server(folder: Path, real: str) -> tuple[str, Callable[[], None]]:
    """Start a server for this test session.

    folder: new, short enough for the name of a socket.  real: the interpreter.  Returns the path of
    the interpreter that starts warm, and a function that ends the server.
    """
    bin_ = folder / "bin"
    bin_.mkdir(parents=True)
    for other in Path(real).parent.iterdir():
        if not other.name.startswith("python"):
            (bin_ / other.name).symlink_to(other)
    client = (HERE / "client.py").read_text()
    values = {"REAL": real, "SOCKET": str(folder / "socket"), "PROJECT": str(PROJECT)}
    for name, value in values.items():
        client = client.replace(f'{name} = ""', f"{name} = {value!r}")
    warm = bin_ / "python3"
    warm.write_text(f"#!{real} -IS\n{client}")
    warm.chmod(0o755)
    (bin_ / "python").symlink_to(warm.name)
    listeners = []
    for name in ("project", "program"):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(folder / f"socket_{name}"))
        listener.listen(64)  # who comes before the server is ready waits
        listeners.append(listener)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    watched, kept = os.pipe()  # ends with this process, and the server with it
    numbers = [*(listener.fileno() for listener in listeners), watched]
    process = subprocess.Popen(
        [
            real,
            "-c",
            "from tests.warm_python import server; server.main()",
            str(warm),
            *map(str, numbers),
        ],
        cwd=PROJECT,
        env=environment,
        pass_fds=numbers,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the tests
    )
    os.close(watched)
    for listener in listeners:
        listener.close()

    def end() -> None:
        os.close(kept)
        process.wait()

    return str(warm), end
