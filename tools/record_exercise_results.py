"""Keep of the results of exercises what their answers read, for tests/test_worksheets.py.

python3 run_exercise.py all --extra --output-dir FOLDER
python3 tools/record_exercise_results.py FOLDER

or, of exercises that were run alone, `record_exercise_results.py FOLDER N ...`.

Where commands and fields of a page have only moved, or a formula has changed that reads nothing
new, nothing needs to be measured again.  This answers the worksheets of exercises N once more from
what is recorded, and the fields that follow from others in benchmarks/results/ too:

python3 tools/record_exercise_results.py moved N ...
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import workshop.exercise.results
from harness.base.documents import SCHEMA_VERSION, read_document
from workshop.exercise.formulas import Unknown
from workshop.exercise.page import exercises, fields, shell_blocks
from workshop.exercise.results import RESULTS, Answer, Results, machine
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
    found = answers(results, exercises()[number].parts(with_extra=True))
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


def record_again(number: int) -> None:
    """Answer the worksheet from what is recorded."""
    recorded = json.loads((RECORDED / f"exercise_{number}.json").read_text())
    del recorded["answers"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, size in recorded.pop("sizes").items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            with (folder / file).open("wb") as empty:
                empty.truncate(size)
        for file, document in recorded.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            content = {"schema_version": SCHEMA_VERSION, **document}
            (folder / file).write_text(json.dumps(content))
        record(folder, number)


def answer_again(path: Path, number: int) -> None:
    """Answer those fields of a machine's stored results that follow from other fields, and leave
    out those that are on the page no more."""
    document = json.loads(path.read_text())
    stored, on_page = document["answers"], fields(exercises()[number].text)
    known = {}
    for name, row in stored.items():
        known[name] = Answer(row["value"], row["evidence"])
    results = Results(path.parent, exercises()[number])

    def needed(name: str) -> Answer:
        answer = known.get(name, Answer(None, "not recorded"))
        if answer.value is None:
            raise Unknown(answer.evidence)
        return answer

    on_template = [name for name in stored if name.startswith("R.")]
    answers_now = {name: stored[name] for name in on_template}
    for field in on_page:
        if "#" in field.formula and ".json" not in stored.get(field.id, {}).get("evidence", ""):
            answer = results.answer(exercises()[number].name, field, needed)
            known[field.id] = answer
            answers_now[field.id] = {"value": answer.value, "evidence": answer.evidence}
            if answer.value is None:
                answers_now[field.id]["value_reason"] = answer.evidence
        elif field.id in stored:
            answers_now[field.id] = stored[field.id]
    document["answers"] = answers_now
    path.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "moved":
        commands = json.loads(COMMANDS.read_text())
        for number in map(int, sys.argv[2:]):
            record_again(number)
            commands[str(number)] = commands_of(number)
            for path in RESULTS.glob(f"*/exercise_{number}.json"):
                answer_again(path, number)
    else:
        commands = json.loads(COMMANDS.read_text())
        for number in list(map(int, sys.argv[2:])) or exercises():
            record(Path(sys.argv[1]) / f"exercise_{number}", number)
            commands[str(number)] = commands_of(number)
    COMMANDS.write_text(json.dumps(commands, indent=1) + "\n")
