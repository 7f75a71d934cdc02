"""The settings of a run: config.json."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from harness.machine.environment import Environment
from harness.schema import Document, field

if TYPE_CHECKING:
    from harness.instruments.schedule import ProfilerConfig
    from harness.model.workload import Workload


class Settings(Document):
    model: dict[str, Any] = field(
        "parameters; fields of TinyLlamaConfig and --size, or file and class of --workload"
    )
    training: dict[str, Any] = field("fields of TrainingConfig: flags as they took effect")
    profiling: dict[str, Any] = field("fields of ProfilerConfig")

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """What every workload tells of itself, and reports read."""
        needed = {"model": ("parameters",), "training": ("batch_size", "precision")}
        for section, names in needed.items():
            for name in names:
                if name not in value[section]:
                    return f"{section}.{name}: is missing"
        parameters = value["model"]["parameters"]
        return None if isinstance(parameters, int) else f"model.parameters: is {parameters}"


class RunConfig(Settings):
    environment: Environment = field("enough to repeat the run")


def settings_of(workload: Workload, profiling: ProfilerConfig) -> Settings:
    """What a run of the workload is asked to do."""
    return Settings(**workload.settings(), profiling=asdict(profiling))


def config_of(settings: Settings, environment: Environment) -> RunConfig:
    """config.json: what a run was asked to do, and where."""
    return RunConfig(
        model=settings.model,
        training=settings.training,
        profiling=settings.profiling,
        environment=environment,
    )
