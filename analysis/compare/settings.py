"""Which settings of runs differ?"""

from __future__ import annotations

from collections.abc import Sequence

from harness.schema import Document, field

# Settings that do not affect the results; DeepSpeed itself sets the variable.
IGNORED = {"output_dir", "profile_dir", "log_interval", "$PYTORCH_NVML_BASED_CUDA_CHECK"}


class DifferentSetting(Document):
    name: str = field("of the setting, or of the environment")
    values: list = field("by run", null="it has none")


def different_settings(tables: Sequence[dict]) -> list[DifferentSetting]:
    """Each name whose values differ between the tables,
    with its values; None where a table lacks it."""
    rows = []
    for name in dict.fromkeys(name for table in tables for name in table):
        if name in IGNORED or name.endswith("_reason"):
            continue
        values = [table.get(name) for table in tables]
        if any(value != values[0] for value in values):
            rows.append(DifferentSetting(name=name, values=values))
    return rows


def settings_text(different: list[DifferentSetting]) -> str:
    """'batch_size 8 | 4, seed 1 | 2'"""
    texts = []
    for setting in different:
        values = dict.fromkeys(str(value) for value in setting.values)
        texts.append(f"{setting.name} {' | '.join(values)}")
    return ", ".join(texts)


def settings_of_run(summary: dict) -> dict:
    """Settings and environment of a run, by name.  summary: performance_summary.json."""
    config, environment = summary["config"], summary["environment"]
    settings = {**config["training"], **config["profiling"], **config["model"]}
    for package, version in environment["packages"].items():
        settings[f"{package} version"] = version
    settings["device"] = environment["device"]["name"]
    for name in ("host", "python", "commit", "uncommitted_changes"):
        settings[name] = environment[name]
    for name, value in environment["variables"].items():
        settings[f"${name}"] = value
    settings["world_size"] = summary["training"]["world_size"]
    return settings
