"""Keep of the results of exercises what their answers read, for tests/test_worksheets.py.

python3 run_exercise.py all --output-dir FOLDER
python3 tools/record_exercise_results.py FOLDER
"""

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import workshop.exercise.results
from harness.base.documents import read_document
from workshop.exercise.page import exercises, fields, shell_blocks
from workshop.exercise.results import Results, machine
from workshop.worksheets.worksheet import answers

RECORDED = Path(__file__).resolve().parent.parent / "tests" / "exercise_results"
COMMANDS = RECORDED / "commands.json"  # by exercise: what it ran as its results were recorded
LONG = 100  # numbers in a list, of which the ends are kept


class Tracked(dict):
    """A JSON object that notes which of its fields are read."""

    def __init__(self, values: dict):
        super().__init__({name: tracked(value) for name, value in values.items()})
        self.read = set()

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.read.add(name)
        return super().get(name, default)

    def __iter__(self):  # before it is merged into another one
        self.read |= super().keys()
        return super().__iter__()

    def keys(self):
        self.read |= super().keys()
        return super().keys()

    def items(self):
        return [(name, self[name]) for name in self]

    def values(self):
        return [self[name] for name in self]

    def __eq__(self, other):
        return dict(self.items()) == other


def tracked(value):
    if isinstance(value, list):
        return [tracked(one) for one in value]
    return Tracked(value) if isinstance(value, dict) else value


def kept(value):
    """What was read, and the reason of each null."""
    if isinstance(value, Tracked):
        fields = dict.items(value)
        return {
            name: kept(one)
            for name, one in fields
            if {name, name.removesuffix("_reason")} & value.read
        }
    if isinstance(value, list):
        if len(value) > LONG and not isinstance(value[0], dict):
            value = value[:2] + value[-2:]
        return [kept(one) for one in value]
    return value


def commands_of(number: int) -> str:
    """A digest of what an exercise runs and of what its worksheet reads."""
    text = exercises()[number].text
    parts = [block.commands for block in shell_blocks(text)]
    parts += [f"{field.id} {field.file} {field.formula}" for field in fields(text)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def record(folder: Path, number: int) -> None:
    documents = {}

    def read(path: Path) -> dict | None:
        name = str(path.relative_to(folder))
        if name not in documents and (document := read_document(path)) is not None:
            documents[name] = Tracked(document)
        return documents.get(name)

    workshop.exercise.results.read_document = read
    results = Results(folder, exercises()[number])
    found = answers(results)
    machine(results.environment)
    traces = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in folder.glob("*/trace_step_*.json*")
    }
    asked = {
        Path(field.file).parent
        for field in fields(exercises()[number].text)
        if field.formula.startswith("file_bytes")
    }
    sizes = {name: size for name, size in traces.items() if Path(name).parent in asked}
    recorded = {
        "answers": {name: answer.value for name, answer in found.items()},
        "sizes": sizes,  # of files whose content is not read
        **{name: kept(document) for name, document in documents.items()},
    }
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(value)}" for name, value in recorded.items()
    )
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"exercise_{number}.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    for number in exercises():
        record(Path(sys.argv[1]) / f"exercise_{number}", number)
    COMMANDS.write_text(
        json.dumps({number: commands_of(number) for number in exercises()}, indent=1) + "\n"
    )
