"""Result folders of an exercise, and the answers that the formulas of its page give from them."""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import PROJECT
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.text import count_of, significant
from workshop.exercise.formulas import NoSuchPath, Record, Unknown, evaluate
from workshop.exercise.page import Exercise, Field, exercises, shell_blocks

RESULTS = PROJECT / "benchmarks" / "results"  # a folder for each machine
TOLERANCE = 0.02  # relative, of a number that was read from a screen
COMPARED = (  # settings of a run, which has to be the one that the page asks for
    "num_steps",
    "seq_len",
    "seq_lens",
    "batch_sizes",
    "size",
    "sizes",
    "n_layers",
    "warmups",
)


@dataclass(frozen=True)
class Answer:
    """What belongs in a field, and where it was read or how it was computed.
    None: unknown on this machine."""

    value: float | int | str | bool | None
    evidence: str  # file and formula; the reason if there is no value
    # Computed from other fields as they stand on the sheet, rounded.
    from_sheet: float | int | str | bool | None = None
    is_disturbed: bool = False  # a time, or what follows from one, of a run that was disturbed

    @property
    def shown(self) -> str:
        """As written into the field."""
        if self.value is None:
            return "unknown"
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        if isinstance(self.value, int | float):
            return significant(self.value)
        return self.value

    @property
    def as_shown(self) -> float | str | bool:
        """The value, rounded to what stands on the sheet."""
        return float(self.shown.replace(",", "")) if isinstance(self.value, float) else self.value


# ---- Stored results ------------------------------------------------------------------------------


def stored_file(name: str) -> Path | None:
    """A file of results that the documentation quotes, which is stored of one CPU alone; None: not
    stored."""
    return next(RESULTS.glob(f"cpu-*/{name}"), None)


def stored_answers(number: int) -> dict:
    """answers_N.json of that CPU; {}: not stored."""
    path = stored_file(f"exercise_{number}.json")
    return read_document(path) if path else {}


def stored_commands(number: int) -> list[dict]:
    """The shell blocks of the exercise that ran there, each an ExerciseCommand; empty if that was
    not recorded."""
    return [
        row for row in stored_answers(number).get("commands") or [] if row["seconds"] is not None
    ]


# ---- Documents -----------------------------------------------------------------------------------

# Units of what does not depend on how fast the run was.
STEADY_UNITS = (
    "MB",
    "KB",
    "FLOPs",
    "FLOPs/byte",
    "allocations",
    "calls",
    "kernels",
    "nats",
    "parameters",
    "samples",
    "tokens",
)

WRONG_FORMULA = (
    NoSuchPath,
    SyntaxError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,  # one that asks for itself
)


class Results:
    """The result folders of an exercise, all in one folder."""

    def __init__(self, folder: Path, exercise: Exercise):
        self.folder, self.exercise = folder, exercise
        self.environment: dict | None = None  # of the first document that has one
        self.documents: dict[str, Record] = {}

    def answers(self, page: str, asked: list[Field], on_page: list[Field]) -> dict[str, Answer]:
        """The answer to each field that is asked for, by its formula, which may name any field
        that is on the page.

        Raises UserError, which names page and line, if a formula or a path in it is wrong."""
        by_id = {field.id: field for field in on_page}
        known: dict[str, Answer] = {}

        def needed(name: str) -> Answer:
            if name not in by_id:
                raise NoSuchPath(f"there is no field {name}")
            other = answer(by_id[name])
            if other.value is None:
                raise Unknown(other.evidence)
            return other

        def answer(field: Field) -> Answer:
            if field.id not in known:
                known[field.id] = self.answer(page, field, needed)
            return known[field.id]

        return {field.id: answer(field) for field in asked}

    def answer(self, page: str, field: Field, needed: Callable[[str], Answer]) -> Answer:
        """The answer to one field.  needed: the answer to another one."""
        files: list[str] = []
        fields_used: dict[str, Answer] = {}

        def read(name: str):
            files[:] = [field.file]  # for the evidence, where one is read
            if name == "file_bytes":
                return self.newest(field.file).stat().st_size
            return getattr(self.document(field.file), name)

        def exact(name: str):
            fields_used[name] = needed(name)
            return fields_used[name].value

        def rounded(name: str):
            return needed(name).as_shown

        try:
            value = evaluate(field.formula, read, exact)
        except Unknown as reason:
            return Answer(None, ": ".join([*files, str(reason)]))
        except WRONG_FORMULA as error:
            problem = ": ".join([*files, str(error)])
            raise UserError(
                f"{page}:{field.line}: {field.id}, `{field.formula}`: {problem}"
            ) from error
        from_sheet = None
        if fields_used:
            # Rounded, two numbers may be equal that are not.
            with contextlib.suppress(Unknown, *WRONG_FORMULA):
                from_sheet = evaluate(field.formula, read, rounded)
        evidence = re.sub(r"#((?:\d+|R)\.\d+)", r"\1", field.formula)
        evidence = ": ".join([*files, evidence])
        values = [f"{name} = {used.shown}" for name, used in fields_used.items()]
        if values:
            evidence += f" ({', '.join(values)})"
        is_disturbed = any(used.is_disturbed for used in fields_used.values())
        if files and field.is_number and field.unit not in STEADY_UNITS:
            is_disturbed = is_disturbed or self.was_disturbed(field.file)
        return Answer(value, evidence, from_sheet, is_disturbed)

    def machine_environment(self) -> dict | None:
        """That of a document that was read or, if none has it, of a run in the folder; None if
        there is no such run."""
        if self.environment:
            return self.environment
        for path in sorted(self.folder.glob("*/performance_summary.json")):
            environment = (read_document(path) or {}).get("environment")
            if environment:
                return environment
        return None

    def was_disturbed(self, file: str) -> bool:
        """Whether a document says that what it measured, or a row or run of it, was disturbed."""
        document = read_document(self.newest(file)) or {}
        of_profile = (document.get("integrity") or {}).get("disturbance") or {}
        if of_profile.get("lost_share"):
            return True
        disturbances = [document.get("disturbance"), *document.get("rows", ())]
        disturbances += document.get("runs", ())
        return any(isinstance(row, dict) and row.get("disturbed") is True for row in disturbances)

    def newest(self, file: str) -> Path:
        """Raises Unknown if the block that writes the file is not for every machine, and UserError,
        which names the command, if it is."""
        paths = [path for path in self.folder.glob(file) if path.is_file()]
        if paths:
            return max(paths, key=lambda path: path.stat().st_mtime)
        folder = file.partition("/")[0]
        writer = self.exercise.writer_of(folder)
        if writer and writer[1].mark:
            raise Unknown(f"{folder}: {writer[1].mark}")
        raise UserError(f"{self.folder / file} is missing: {self.written_by(folder)}")

    def document(self, file: str) -> Record:
        """The newest document of this name, which may have *; of a run that was completed, as the
        page asks for it."""
        if file not in self.documents:
            path, folder = self.newest(file), file.partition("/")[0]
            document = read_document(path)
            if document is None:
                raise UserError(
                    f"{path}: was not written by this workshop; {self.written_by(folder)}"
                )
            if document.get("status", "completed") != "completed":
                raise UserError(
                    f"{path}: the run was {document['status']}; {self.written_by(folder)}"
                )
            self.check_settings(path, document, folder)
            self.environment = self.environment or document.get("environment")
            self.documents[file] = Record(document)
        return self.documents[file]

    def check_settings(self, path: Path, document: dict, folder: str) -> None:
        """Raises UserError if the run is not the one that the page asks for."""
        settings, asked = settings_of(document), self.flags_of(folder)
        for name in COMPARED:
            if name not in settings or name not in asked:
                continue
            given = settings[name] if isinstance(settings[name], list) else [settings[name]]
            if list(map(str, given)) != asked[name]:
                needs = f"exercise {self.exercise.number} needs {' '.join(asked[name])}"
                raise UserError(
                    f"{path}: has {name} {settings[name]}, and {needs}; {self.written_by(folder)}"
                )

    def flags_of(self, folder: str) -> dict[str, list[str]]:
        """The flags of the command on the page that writes the folder."""
        for block in shell_blocks(self.exercise.text):
            for line in block.commands.replace("\\\n", " ").splitlines():
                if re.search(rf"-dir \S*{re.escape(folder)}(?![\w-])", line):
                    flags = re.findall(r"(?<=\s--)([a-z-]+)((?:\s+(?!-)[^\s$|]+)*)", line)
                    return {name.replace("-", "_"): values.split() for name, values in flags}
        return {}

    def written_by(self, folder: str) -> str:
        """Which command writes such folders, and of which exercise the folder has results."""
        launched = folder.startswith("performance_results")
        writer = self.exercise.writer_of("launch_performance_study.sh" if launched else folder)
        present = [
            number for number in exercises() if any(self.folder.glob(f"exercise{number}_*/"))
        ]
        hint = ""
        if present and self.exercise.number not in present:
            hint = f"; {self.folder} has results of exercise {present[0]}"
        where = f"{self.exercise.name}:{writer[0]}" if writer else self.exercise.name
        return f"the command in {where} writes it{hint}"


def machine(environment: dict) -> str:
    """The device, the versions and the date of a measurement."""
    threads = count_of(environment["cpu"]["torch_threads"], "thread")
    versions = f"torch {environment['packages']['torch']}, Python {environment['python']}"
    return (
        f"{environment['device']['name']}, {threads}, {versions}, {environment['timestamp'][:10]}"
    )


def settings_of(document: dict) -> dict:
    """The settings of a run, a prediction, a sweep or a benchmark."""
    sections = document.get("config", document)
    settings = {}
    for name in ("size", "batch_size", "device_memory_mb"):
        if name in document:
            settings[name] = document[name]
    for name in ("settings", "training", "profiling", "model"):
        settings.update(sections.get(name, {}))
    return settings
