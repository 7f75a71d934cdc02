"""What a trace tells of people, machines and programs, taken out of it so that it can be mailed.

What the analysis reads stays: names of operators, kernels, modules and ranges, shapes, types, times
and devices.  In these texts, paths, addresses and the names of users and hosts have stand-ins, the
same wherever the same stood, also in the traces of other ranks.  All other texts are left out.
"""

import json
import os
import re
import socket
from collections import defaultdict
from collections.abc import Collection, Iterable
from hashlib import blake2s
from pathlib import Path

import msgspec

from analysis.trace.readers.chrome import Arguments, ChromeTrace
from harness.base.text import count_of

_PART = r"[^\s/\\\"',;:()<>|]+"  # of a path
_HEX = "[0-9A-Fa-f]"
PLACES = {  # what a text may contain: of the net, of mail, of a device; of files
    "address": (
        r"\b[A-Za-z][\w+.-]*://[^\s\"',;()<>]+|(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])"
        rf"|(?<![\w:])(?:(?:{_HEX}{{1,4}}:){{3,}}|fe80:)(?:{_HEX}|:)+|\b{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}\b"
        r"|(?<![/\\\w])[\w.+-]+@[\w.-]+|(?<![\w.])(?:[\w-]+\.)+(?:com|net|org|edu|gov|internal|local|lan)\b"
    ),
    "file": (
        rf"(?:~|(?<!\w)[A-Za-z]:)(?:[/\\]+{_PART})+|(?<![\w.)\]>])(?:[/\\]+{_PART}){{2,}}"
        r"|(?:[\w.@-]+[/\\]+)*[\w@-]+\.py\b"
    ),
}
OF_A_LIBRARY = re.compile(
    r"(?:site|dist)-packages|[/\\]lib[/\\]python\d|^torch[/\\]"
)  # files whose names stay
# Texts that stay anywhere: numbers, and what profilers call processes, threads, streams and groups.
KNOWN = re.compile(
    r"[A-Za-z]?|-?\d+(\.\d+)?|0x\d+|undefined|default_pg|Spans|Traces|(Trace )?PyTorch Profiler"
    r"|(CPU|GPU|MTIA|XPU)( \d+)?|(process|thread)_(name|labels|sort_index)"
    r"|((thread|stream) -?\d+ ?)?\(?(python[\d.]*|pt_autograd_\d+)?\)?"
)
FIELDS = "ph cat name pid tid ts dur args id s bp".split()  # of an event
STAND_INS = dict.fromkeys(
    ("Process Group Name", "Process Group Description", "pg_name", "pg_desc"), "group"
)
# The boot tells whether two traces have one clock.
STAND_INS |= {
    "pid": "program",
    "name": "program",
    "labels": "program",
    "tid": "thread",
    "boot_id": "host",
}
TEXTS = {one.encode_name for one in msgspec.structs.fields(Arguments)} - {
    *STAND_INS
}  # that the analysis reads
TEXTS_OF_METADATA = ("name", "backend", "backend_config", "nccl_version")
METADATA = ("deviceProperties", "distributedInfo", "hostInfo")  # that stay, beside numbers
# Where users and hosts are named as such, also in the name that PyTorch gives a file; they may
# stand alone elsewhere.
NAMED = re.compile(
    rf"[/\\]+(?:home|[Uu]sers)[/\\]+({_PART})|torchinductor_([A-Za-z0-9]+)|/([^/]+)_\d+\.\d+\.pt\.trace\.json"
    r'|"(?i:user_?name|user|login|logname|owner|started_by|host_?name|host|node_?name|node|master_addr)"\s*:\s*"([^"\\]+)"'
    r'|\b(?:USER|LOGNAME|HOSTNAME|HOST|MASTER_ADDR)=([\w.@-]+)|"hostInfo"\s*:\s*\{\s*"name"\s*:\s*"([^"]+)"'
)
STAYS = (
    "Stays: names of operators, kernels, modules and ranges, your own too; shapes, types, times,"
    " devices"
)
OF_NOBODY = "root user users ubuntu admin home python torch node host localhost none null".split()


def names_of(source: Path) -> set[str]:
    """The users and hosts that a trace names as such, and those of this process; of a name with a
    domain also what is before it."""
    here = f"HOST={socket.gethostname()} USER={os.environ.get('USER')}"
    file, found = ChromeTrace(source), {*NAMED.findall(f"{here} /{source.name}")}
    for _, text in file.records():
        found |= {*NAMED.findall(bytes(text).decode(errors="replace"))}
    found |= {*NAMED.findall(json.dumps(file.metadata))}
    return {
        part for names in found for name in names for part in (name, re.split(r"[@.]", name)[0])
    }


class Redaction:
    """Takes out of a trace what it tells of people, machines and programs.  names: of users and
    hosts, taken out wherever they stand."""

    def __init__(self, names: Iterable[str]):
        known = [
            one
            for one in names
            if re.fullmatch(r"(?=.*[A-Za-z]).{3,}", one) and one.lower() not in OF_NOBODY
        ]
        listed = (
            "|".join(map(re.escape, sorted(known, key=len, reverse=True))) or r"(?!)"
        )  # the longest first
        places = "|".join(f"(?P<{kind}>{pattern})" for kind, pattern in PLACES.items())
        self.pattern = re.compile(
            rf"{places}|(?<![A-Za-z0-9])(?P<name>(?i:{listed}))(?![A-Za-z0-9])"
        )
        self.seen: dict[str, str] = {}  # texts with stand-ins
        self.replaced: dict[str, set[str]] = defaultdict(set)  # by kind
        self.left_out: set[str] = set()  # names of arguments and metadata

    def event(self, text: bytes) -> bytes:
        """The event, as JSON too."""
        found = json.loads(text.decode(errors="replace"))
        found = found if isinstance(found, dict) else {}
        # What a viewer calls a process or a thread is in the arguments.
        own, given = (["cat"], []) if found.get("ph") == "M" else (["cat", "name"], TEXTS)
        kept = {
            key: self.value(key, found[key], given if key == "args" else own)
            for key in FIELDS
            if key in found
        }
        return json.dumps(kept).encode()

    def metadata(self, found: dict) -> dict:
        """What the file tells beside its events."""
        kept = {
            key: one
            for key, one in found.items()
            if key in METADATA or isinstance(one, int | float)
        }
        self.left_out |= found.keys() - kept.keys()
        if name := (kept.get("hostInfo") or {}).get("name"):  # of any form
            kept["hostInfo"] = kept["hostInfo"] | {"name": self.stand_in("host", str(name))}
        return self.value("", kept, TEXTS_OF_METADATA)

    def value(self, name: str, found: object, texts: Collection[str]) -> object:
        """What may stay of a value of this name; texts: names of those that stay, but for what is
        replaced in them."""
        if isinstance(found, dict):
            return {self.text(key): self.value(key, one, texts) for key, one in found.items()}
        if isinstance(found, list):
            return [self.value(name, one, texts) for one in found]
        if not isinstance(found, str) or KNOWN.fullmatch(found):
            return found
        if name in texts:
            return self.text(found)
        if name in STAND_INS:
            return self.stand_in(STAND_INS[name], found)
        self.left_out.add(name)
        return ""

    def text(self, found: str) -> str:
        if found not in self.seen:
            self.seen[found] = self.pattern.sub(
                lambda match: self.stand_in(match.lastgroup, match[0]), found
            )
        return self.seen[found]

    def stand_in(self, kind: str, found: str) -> str:
        self.replaced[kind].add(found)
        if kind == "file" and OF_A_LIBRARY.search(found):
            return re.split(r"[/\\]", found)[-1]
        ending = ".py" if found.endswith(".py") else ""
        return (
            f"{kind}_{blake2s(found.encode(errors='replace'), digest_size=3).hexdigest()}{ending}"
        )

    def told(self) -> list[str]:
        """What was done, in sentences."""
        counts = ", ".join(count_of(len(found), kind) for kind, found in self.replaced.items())
        return [
            (
                f"Replaced: {counts or 'nothing'}; left out:"
                f" {', '.join(sorted(self.left_out)) or 'nothing'}"
            ),
            STAYS,
        ]
