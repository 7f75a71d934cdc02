"""The interpreter that starts warm, see __init__.py.  Runs as `python -IS`, so that it itself
starts in no time."""

import os
import sys

REAL = ""  # the interpreter
SOCKET = ""  # where the server listens
PROJECT = ""
# What libraries read of the environment while they are imported: another value needs a process that
# imports them.
READ_AT_IMPORT = (
    "CUDA_",
    "GOMP_",
    "HIP_",
    "KINETO_",
    "KMP_",
    "LD_",
    "MKL_",
    "MPL",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
)
READ_AT_IMPORT += ("PYTORCH_", "ROCR_", "TORCH", "TRITON_")
# But for what is set in the fork as well, or is read later.
READ_LATER = {
    "CUDA_VISIBLE_DEVICES",
    "PYTHON",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    # Commands set these for themselves.
    "GOMP_SPINCOUNT",
    "KINETO_LOG_LEVEL",
    "TORCH_CPP_LOG_LEVEL",
    # Set so that runs iterate over sets in the same order: forks of one process do.
    "PYTHONHASHSEED",
}
WORKERS = (
    "from multiprocessing.forkserver import main",
    "from multiprocessing.spawn import spawn_main",
)


def real_one():
    os.execv(REAL, [REAL, *sys.argv[1:]])


def read_at_import(environment):
    names = (
        name for name in environment if name.startswith(READ_AT_IMPORT) and name not in READ_LATER
    )
    return {name: environment[name] for name in names if not name.startswith("TORCHELASTIC_")}


def kind_of_start(arguments):
    """(kind, what to run, its arguments, whether it is of the project), or None: a process from
    nothing."""
    if not arguments:
        return None
    first = arguments[0]
    if first == "-m" and len(arguments) > 1:
        if arguments[1] != "torch.distributed.run":
            return None
        return "module", arguments[1], arguments[2:], False
    if first == "-c" and len(arguments) > 1:
        if not arguments[1].startswith(WORKERS):
            return None
        return "code", arguments[1], arguments[2:], os.environ.get("WARM_PYTHON") == "project"
    if first.startswith("-") or not first.endswith(".py"):
        return None
    path = os.path.realpath(first)
    of_project = os.path.dirname(path) == PROJECT
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError:
        return None
    if not of_project and b"torch" not in source and b"harness." not in source:
        return None  # it starts as fast from nothing
    return "script", first, arguments[1:], of_project


LOADED = (
    "torch",
    "numpy",
    "transformers",
)  # packages that a warm process has imported: no others take their place


def is_watched(environment):
    """Whether it is a process of a program that prove_changes.py runs, or that profile_program.py
    runs in a test which asks for warm ones.  Others start as they do for a user: their subject is
    the tree of processes, or what happens while PyTorch is imported."""
    settings = environment.get("PROFILE_PROGRAM_SETTINGS", "")
    return '"trial"' in settings or bool(settings and environment.get("WARM_PROGRAMS"))


def searched(environment):
    """Folders of PYTHONPATH; None if Python would run something from there as it starts, or take
    from there what a warm process has imported from elsewhere."""
    folders = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    for folder in folders:
        known = os.path.realpath(folder) == os.path.join(PROJECT, "tests", "pretend_gpu")
        if is_watched(environment) and os.path.exists(os.path.join(folder, "processes")):
            known = True
        if os.path.exists(os.path.join(folder, "sitecustomize.py")) and not known:
            return None
        if any(os.path.exists(os.path.join(folder, package)) for package in LOADED):
            return None
    return folders


def request():
    """What the server needs to know, or None."""
    environment = dict(os.environ)
    arguments, unbuffered = sys.argv[1:], bool(environment.get("PYTHONUNBUFFERED"))
    if arguments[:1] == ["-u"]:
        arguments, unbuffered = arguments[1:], True
    start, folders = kind_of_start(arguments), searched(environment)
    if start is None or folders is None or environment.get("WARM_PYTHON") == "no":
        return None
    kind, what, rest, of_project = start
    return {
        "kind": kind,
        "what": what,
        "arguments": rest,
        "of_project": of_project,
        "unbuffered": unbuffered,
        "folders": folders,
        "environment": environment,
        "read_at_import": read_at_import(environment),
        "folder": os.getcwd(),
        "original": sys.argv[1:],
        "mounts": os.readlink("/proc/self/ns/mnt"),
    }


def main():
    import signal

    asked = request()
    if asked is None:
        real_one()
    import array
    import contextlib
    import json
    import resource
    import socket

    opened = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    opened = [fd for fd in opened if fd != connection.fileno()]
    files = []
    for fd in opened:
        try:
            os.fstat(fd)
        except OSError:  # of the listing
            continue
        files.append(fd)
    if files[:3] != [0, 1, 2]:
        real_one()
    limits = {}
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            limits[name] = resource.getrlimit(getattr(resource, name))
    ignored = [
        int(number)
        for number in signal.valid_signals()
        if signal.getsignal(number) == signal.SIG_IGN
    ]
    asked |= {"files": files, "limits": limits, "ignored": ignored, "umask": os.umask(0)}
    os.umask(asked["umask"])
    asked |= {"cores": sorted(os.sched_getaffinity(0)), "nice": os.getpriority(os.PRIO_PROCESS, 0)}
    passed = [
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ]
    passed = [number for number in passed if int(number) not in ignored]
    signal.pthread_sigmask(signal.SIG_BLOCK, passed)  # until there is a process that they are for
    try:
        connection.connect(f"{SOCKET}_project" if asked["of_project"] else f"{SOCKET}_program")
    except OSError:  # the session of tests has ended
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
        real_one()
    text = json.dumps(asked).encode()
    namespaces = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("user", "mnt")]
    sent = array.array("i", files + namespaces)
    header = len(text).to_bytes(8, "little")
    connection.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
    connection.sendall(text)
    answers = connection.makefile("r")
    pid = answers.readline().split()
    if pid in (["refused"], []):  # [] by a server that has ended
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
        connection.close()
        real_one()
    pid = int(pid[0])
    for fd in files + namespaces:
        if fd > 2:
            os.close(fd)  # their other end waits until all have closed them
    empty = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(empty, fd)

    def pass_on(number, frame):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in passed:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
    line = answers.readline()
    code = int(line) if line else -int(signal.SIGKILL)  # the server is gone
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, limits["RLIMIT_CORE"][1]))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    signal.pause()


if __name__ == "__main__":
    main()
