"""TensorBoard's event file: what a run is, scalars of its steps, its figures, and its row in the
HPARAMS tab."""

import json
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from harness.base.files import writing
from harness.base.units import MB
from harness.instruments.timing import StepRecord
from harness.ranks.parallel import ParallelConfig

# No columns of TensorBoard's HPARAMS tab: they affect neither speed nor memory nor the loss.
HIDDEN = (
    "num_steps output_dir log_interval force device norm_eps rope_theta init_std max_seq_len"
    " source_sha256".split()
)


def in_words(settings: dict) -> dict:
    """Without booleans and None: TensorBoard would show booleans as numbers, and leave out None."""
    words = {None: "none", False: "no", True: "yes"}
    return {
        name: words[one] if one is None or isinstance(one, bool) else one
        for name, one in settings.items()
    }


def scalars_of(record: StepRecord, samples: int, seq_len: int) -> dict[str, float]:
    """Of one step, by tag.  TensorBoard sorts by name: loss and step time come first.  samples: of
    all ranks."""
    rate = samples / (record.total_ms / 1e3)
    scalars = {
        "loss": record.loss,
        "step_time_ms": record.total_ms,
        **{f"step_time_ms/{phase}": ms for phase, ms in record.phase_ms.items()},
        "throughput/samples_per_sec": rate,
        **({"throughput/tokens_per_sec": rate * seq_len} if seq_len > 1 else {}),
        "used_memory_mb": record.memory_bytes / MB,
    }
    if record.grad_norm is not None:
        scalars["grad_norm"] = record.grad_norm
    if record.interval.run_s:
        scalars["waited_share"] = record.interval.waited_share
    return scalars


def hyperparameters(summary: dict) -> dict:
    """Settings and results of a run, from performance_summary.json: a row of the HPARAMS tab.
    Results as metrics would each be a curve of one point under SCALARS."""
    every = summary["config"]["training"] | summary["config"]["model"]
    hidden = {*HIDDEN, *(name for name in every if name.endswith("_reason"))}
    if summary["training"]["world_size"] == 1:
        hidden |= {one.name for one in fields(ParallelConfig)}
    performance = summary["performance"]
    results = {
        name: performance[name]
        for name in ("avg_step_time_ms", "samples_per_sec", "achieved_tflops")
    }
    results |= {
        "peak_memory_mb": summary["memory"]["peak_mb"],
        "final_loss": summary["loss"]["final"],
    }
    return in_words({name: every[name] for name in every if name not in hidden} | results)


class EventFile:
    """Every method raises UserError if the file cannot be written."""

    FLUSH_S = (
        10.0  # seconds between two writes of scalars: writing takes time, so not after every step
    )

    def __init__(self, folder: Path, samples: int, seq_len: int):
        """samples: of a step, on all ranks; seq_len: tokens of each."""
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.samples, self.seq_len = folder, samples, seq_len
        self.writer = SummaryWriter(str(folder))
        self._unwritten: list[StepRecord] = []
        self._begun = False
        self._flushed_at = time.monotonic()

    def add_texts(self, document: dict) -> None:
        """A text for each section of the document."""
        for title, values in document.items():
            self.writer.add_text(
                title, "    " + json.dumps(values, indent=2).replace("\n", "\n    ")
            )

    def add_step(self, record: StepRecord) -> None:
        self._unwritten.append(record)
        if time.monotonic() - self._flushed_at > self.FLUSH_S:
            self.write_scalars()

    def write_scalars(self) -> None:
        """From the second step on: one point is no curve."""
        self._begun |= len(self._unwritten) > 1
        if not self._begun:
            return
        with writing(f"events in {self.folder}"):
            for record in self._unwritten:
                for tag, value in scalars_of(record, self.samples, self.seq_len).items():
                    self.writer.add_scalar(tag, value, record.step, walltime=record.ended_at)
            self._unwritten.clear()
            self._flushed_at = time.monotonic()
            self.writer.flush()

    def close(self, summary: dict, figures: dict[str, Any]) -> None:
        """Write what is left: the figures by name, the last scalars, the row of the HPARAMS tab."""
        from torch.utils.tensorboard.summary import hparams

        with writing(f"events in {self.folder}"):
            for name, figure in figures.items():
                self.writer.add_figure(
                    f"whole_run/{name}", figure
                )  # as the report calls it: one card
            self.write_scalars()
            for part in hparams(hyperparameters(summary), {}):
                self.writer.file_writer.add_summary(part)
            self.writer.close()
