"""The optimizations, a record each: for checks of flags, studies, opportunities, predictions,
output, documentation.

A new one is a field of the script's OptimizationConfig, with the text of --help,
and a section of optimizations.ini.
"""

import itertools
from collections.abc import Mapping
from configparser import SectionProxy
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from harness.base.command_line import compiler_problem
from harness.base.text import flag_of, read_ini
from harness.model.changes import CHANGES, ROUNDING


class Optimization(NamedTuple):
    """A value of a setting that computes the same step faster or in less memory."""

    name: str  # in --rungs, and for those who replace it
    setting: str  # the field of the script's TrainingConfig
    value: object = True
    answers: tuple[str, ...] = ()  # what a trace's opportunities call that which it improves
    effect: str = ""  # for the documentation, where the text of --help does not do
    may: str = ROUNDING  # the most that it does to gradients
    climbs: bool = (
        True  # it is part of the ladder; the others save memory, or change the arithmetic
    )
    studied: bool = True  # the optimization study measures it
    replaced_by: tuple[
        str, ...
    ] = ()  # those that take its place on the ladder: they do the same, or exclude it
    excludes: Mapping[str, str] = MappingProxyType(
        {}
    )  # other flags, with any value if none is named: why
    without_gpu: str = ""  # if it needs a GPU: what to do where there is none
    compiles: bool = False  # it needs a compiler, on a GPU Triton too
    any_model: bool = False  # it does not depend on how a model is written: --workload takes it
    saves_memory: bool = False  # enough to be proposed where a step does not fit

    @property
    def flag(self) -> str:
        """'--attention sdpa'"""
        return flag_of(self.setting, self.value)


YES_NO = ("climbs", "studied", "compiles", "any_model", "saves_memory")


def _record(row: SectionProxy) -> Optimization:
    """That of a section of optimizations.ini."""
    change = CHANGES[row["change"]] if "change" in row else None
    told = {name: getattr(change, name) for name in ("answers", "effect", "may")} if change else {}
    told |= {
        name: row[name] for name in ("setting", "value", "effect", "without_gpu") if name in row
    }
    told |= {name: row.getboolean(name) for name in YES_NO if name in row}
    told |= {"answers": tuple(row["answers"].splitlines())} if "answers" in row else {}
    texts = {key: text.format(**row.parser.defaults()) for key, text in row.items()}
    told["excludes"] = {
        key.split(maxsplit=1)[1]: text for key, text in texts.items() if key.startswith("excludes ")
    }
    return Optimization(row.name, replaced_by=tuple(row.get("replaced_by", "").split()), **told)


_TABLE = read_ini(Path(__file__).with_suffix(".ini"))
OPTIMIZATIONS = [_record(_TABLE[name]) for name in _TABLE.sections()]  # in the order of the ladder
ANY_MODEL = tuple(
    dict.fromkeys(one.setting for one in OPTIMIZATIONS if one.any_model)
)  # settings of --workload too
OUR_MODEL = tuple(
    one.setting for one in OPTIMIZATIONS if not one.any_model
)  # settings of the script's model alone


def in_use(settings: Mapping[str, Any]) -> list[Optimization]:
    """settings: by name, such as the section training of config.json."""
    values = [
        (one, settings.get(one.setting)) for one in OPTIMIZATIONS
    ]  # of checkpointing there are several
    return [one for one, value in values if value == one.value or (value and one.value is True)]


def flags_in_use(settings: Mapping[str, Any]) -> list[str]:
    """As typed; without the precision, which is told by itself."""
    return [
        flag_of(one.setting, settings[one.setting])
        for one in in_use(settings)
        if one.setting != "precision"
    ]


def answering(opportunity: str) -> list[str]:
    """The flags that answer an opportunity of a trace; the first one is the one to propose."""
    return [one.flag for one in OPTIMIZATIONS if opportunity in one.answers]


def conflict(training: Any, profiling: Any) -> str | None:
    """The line that refuses two flags together, None if none exclude each other.  Both are
    dataclasses of flags."""
    both = [
        (field, getattr(config, field.name))
        for config in (training, profiling)
        for field in fields(config)
    ]
    changed = [flag_of(field.name, value) for field, value in both if value != field.default]
    refused = (
        f"{one.flag} and {flag} exclude each other, omit one: {why}"
        for one, flag in itertools.product(in_use(vars(training)), changed)
        for other, why in one.excludes.items()
        if flag == other or flag.startswith(f"{other} ")
    )
    return next(refused, None)


def missing(training: Any, on_gpu: bool) -> str | None:
    """The line that says why this machine cannot train so,
    None if it can as far as a look tells."""
    for one in in_use(vars(training)):
        if one.without_gpu and not on_gpu:
            return f"{one.flag}: {one.without_gpu}"
        if one.compiles and (problem := compiler_problem(on_gpu)):
            return f"{one.flag}: {problem}"
    return None
