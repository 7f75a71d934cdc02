"""TensorBoard's event file: what a run is, scalars of its steps, its figures, and its row in the
HPARAMS tab."""

import json
import struct
import textwrap
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from harness.base.files import writing
from harness.base.units import MB
from harness.instruments.timing import StepRecord
from harness.ranks.parallel import ParallelConfig

# No columns of TensorBoard's HPARAMS tab: they affect neither speed nor memory nor the loss.
HIDDEN = {
    "num_steps",
    "output_dir",
    "log_interval",
    "force",
    "device",
    "norm_eps",
    "rope_theta",
    "init_std",
    "max_seq_len",
    "source_sha256",
}
OF_SEVERAL_RANKS = {setting.name for setting in fields(ParallelConfig)}
WORDS = {None: "none", False: "no", True: "yes"}


def in_words(settings: dict) -> dict:
    """Without booleans and None: TensorBoard would show booleans as numbers, and leave out None."""
    shown = {}
    for name, value in settings.items():
        shown[name] = WORDS[value] if value is None or isinstance(value, bool) else value
    return shown


def scalars_of(record: StepRecord, samples: int, seq_len: int) -> dict[str, float]:
    """Of one step, by tag.  TensorBoard sorts by name: loss and step time come first.  samples: of
    all ranks."""
    samples_per_s = samples / (record.total_ms / 1e3)
    scalars = {"loss": record.loss, "step_time_ms": record.total_ms}
    for phase, phase_ms in record.phase_ms.items():
        scalars[f"step_time_ms/{phase}"] = phase_ms
    scalars["throughput/samples_per_sec"] = samples_per_s
    if seq_len > 1:
        scalars["throughput/tokens_per_sec"] = samples_per_s * seq_len
    scalars["used_memory_mb"] = record.memory_bytes / MB
    if record.grad_norm is not None:
        scalars["grad_norm"] = record.grad_norm
    if record.interval.run_s:
        scalars["waited_share"] = record.interval.waited_share
    return scalars


def hyperparameters(summary: dict) -> dict:
    """Settings and results of a run, from performance_summary.json: a row of the HPARAMS tab.
    Results as metrics would each be a curve of one point under SCALARS."""
    hidden = HIDDEN
    if summary["training"]["world_size"] == 1:
        hidden = HIDDEN | OF_SEVERAL_RANKS
    row = {}
    for section in ("training", "model"):
        for name, value in summary["config"][section].items():
            if name not in hidden and not name.endswith("_reason"):
                row[name] = value
    for name in ("avg_step_time_ms", "samples_per_sec", "achieved_tflops"):
        row[name] = summary["performance"][name]
    row["peak_memory_mb"] = summary["memory"]["peak_mb"]
    row["final_loss"] = summary["loss"]["final"]
    return in_words(row)


def add_picture(writer: Any, name: str, png: bytes) -> None:
    """Put a PNG into IMAGES.  A run and its report call a figure the same, so that TensorBoard has
    one card for both."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    width, height = struct.unpack(">II", png[16:24])  # where the header of a PNG has them
    image = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=4)
    value = Summary.Value(tag=f"whole_run/{name}", image=image)
    writer.file_writer.add_summary(Summary(value=[value]))


class EventFile:
    """Every method raises UserError if the file cannot be written."""

    FLUSH_S = 10.0  # between two writes of scalars: they take time, so not after every step

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
            text = json.dumps(values, indent=2)
            self.writer.add_text(title, textwrap.indent(text, "    "))

    def add_step(self, record: StepRecord) -> None:
        """Keep the scalars of a step, and write those that are waiting from time to time."""
        self._unwritten.append(record)
        if time.monotonic() - self._flushed_at > self.FLUSH_S:
            self.write_scalars()

    def write_scalars(self) -> None:
        """From the second step on: one point is no curve."""
        if len(self._unwritten) > 1:
            self._begun = True
        if not self._begun:
            return
        with writing(f"events in {self.folder}"):
            for record in self._unwritten:
                for tag, value in scalars_of(record, self.samples, self.seq_len).items():
                    self.writer.add_scalar(tag, value, record.step, walltime=record.ended_at)
            self._unwritten.clear()
            self._flushed_at = time.monotonic()
            self.writer.flush()

    def close(self, summary: dict, figures: dict[str, bytes]) -> None:
        """Write what is left: the figures, the last scalars, the row of the HPARAMS tab.

        figures: PNG by name."""
        from torch.utils.tensorboard.summary import hparams

        with writing(f"events in {self.folder}"):
            for name, picture in figures.items():
                add_picture(self.writer, name, picture)
            self.write_scalars()
            for part in hparams(hyperparameters(summary), {}):
                self.writer.file_writer.add_summary(part)
            self.writer.close()
