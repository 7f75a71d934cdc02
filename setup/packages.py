"""What has this Python of what the requirement files name?  The launchers ask before setting up.

python3 setup/packages.py look FILE...   "torch VERSION" or "torch none", then each requirement that
                                         is missing or too old, one a line
python3 setup/packages.py version NAME   of an installed package; exit code 1 if it is missing
python3 setup/packages.py pins FILE      the pins of what is missing; torch is pinned as it is
python3 setup/packages.py build          of torch, with Python and the machine: "cpu Python 3.11 on
                                         x86_64"
python3 setup/packages.py own_rocm       the ROCm that the installed torch brings along, if it does
python3 setup/packages.py urls REPORT    what pip's report would install, as requirements

It needs the standard library alone.  In a Python that is too old for the project it answers
nothing, with exit code 1.
"""

import glob
import importlib.util
import json
import os
import re
import runpy
import sys

if sys.version_info < (3, 10):  # noqa: UP036 - it may be any python3 on PATH
    sys.exit(1)

from importlib import metadata


def version(name: str) -> str | None:
    """The installed version of a package; None if it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def numbers(text: str) -> list[int]:
    """Of a version, without its build: [2, 13, 0] of 2.13.0+cpu."""
    return [int(number) for number in re.findall(r"\d+", text.split("+")[0])]


def lines_of(path: str) -> list[str]:
    """The lines of a requirement file, without comments."""
    with open(path) as file:
        lines = [line.split("#")[0].strip() for line in file]
    return [line for line in lines if line]


def look(*paths: str) -> None:
    lacking = []
    for path in paths:
        for line in lines_of(path):
            name, _, minimum = line.partition(">=")
            installed = version(name)
            if installed is None:
                lacking.append(name)
            elif numbers(installed) < numbers(minimum):
                lacking.append(line)
    # Last: to the launchers, an answer that begins is whole.
    print("torch", version("torch") or "none")
    for requirement in lacking:
        print(requirement)


def print_version(name: str) -> None:
    installed = version(name)
    if installed is None:
        sys.exit(1)
    print(installed)


def pins(path: str) -> None:
    for line in lines_of(path):
        name = line.split("==")[0].strip()
        installed = version(name)
        if installed is None:
            print(line)
        elif name == "torch":
            print(f"torch=={installed}")


def folder_of_torch() -> str:
    return os.path.dirname(importlib.util.find_spec("torch").origin)


def build() -> None:
    # torch/version.py tells the build within milliseconds; importing torch takes seconds.
    names = runpy.run_path(os.path.join(folder_of_torch(), "version.py"))
    if names.get("hip"):
        kind = "rocm" + ".".join(names["hip"].split(".")[:2])
    elif names.get("cuda"):
        kind = f"cuda{names['cuda']}"
    else:
        kind = "cpu"
    python = ".".join(map(str, sys.version_info[:2]))
    print(kind, "Python", python, "on", os.uname().machine)


def own_rocm() -> None:
    libraries = glob.glob(os.path.join(folder_of_torch(), "lib", "libamdhip64.so*"))
    package = importlib.util.find_spec("_rocm_sdk_core")
    if libraries:
        print(libraries[0])
    elif package:
        print(package.submodule_search_locations[0])


def urls(path: str) -> None:
    with open(path) as file:
        report = json.load(file)
    for package in report["install"]:
        print(package["metadata"]["name"], "@", package["download_info"]["url"])


QUESTIONS = {
    "look": look,
    "version": print_version,
    "pins": pins,
    "build": build,
    "own_rocm": own_rocm,
    "urls": urls,
}

if __name__ == "__main__":
    QUESTIONS[sys.argv[1]](*sys.argv[2:])
