"""Forward time, backward time and memory of attention alone,
by implementation and sequence length."""

import itertools

from harness.documents.comparisons import AttentionBenchmarkRow
from studies.attention import results
from studies.attention.cost import measure_attention, predicted_or_refused
from studies.attention.implementations import IMPLEMENTATIONS, KEY, SDPA_BACKENDS, names_of
from studies.engine.command_line import ByDevice, Flags
from studies.engine.report import Report
from studies.engine.study import Study
from studies.engine.sweep import Cell


class AttentionBenchmark(Study):
    name, row_type, key, results = "attention_benchmark", AttentionBenchmarkRow, KEY, results

    @staticmethod
    def add_flags(flags: Flags) -> None:
        kernels = [f"sdpa-{name}" for name in SDPA_BACKENDS]
        text = (
            f"{', '.join(IMPLEMENTATIONS)}: every kernel that sdpa has here, or one of"
            f" {', '.join(kernels)}"
        )
        names, default = [*IMPLEMENTATIONS, *kernels], [*IMPLEMENTATIONS]
        flags.choices("--implementations", f"{text} (the first four)", names, default=default)
        default = ByDevice([16, 32, 64, 128], [16, 64])
        flags.count("--d-heads", "head dimensions (%(default)s)", nargs="+", default=default)
        default = ByDevice([256, 1024, 4096, 8192, 16384], [256, 1024, 4096])
        flags.count("--seq-lens", "tokens (%(default)s)", nargs="+", default=default)
        flags.count("--batch-size", "samples (%(default)s)", default=8)
        dtypes, default = ["fp32", "bf16", "fp16"], ByDevice(["fp32", "bf16"], ["fp32"])
        flags.choices(
            "--dtypes", "fp32, bf16, fp16 (%(default)s)", dtypes, metavar="TYPE", default=default
        )
        flags.add("--causal", action="store_true", help="each token sees only those before it")
        flags.count("--repetitions", "timed passes (%(default)s)", default=ByDevice(100, 5))
        flags.count("--warmup-steps", "warm-up passes (%(default)s)", minimum=0, default=2)

    def prepare(self) -> None:
        self.device.check_precisions(self.args.dtypes, "--dtypes")
        self.args.implementations = names_of(self.args.implementations, self.device.device)

    def cells(self) -> list[Cell]:
        args = self.args
        combinations = itertools.product(
            args.dtypes, args.implementations, args.d_heads, args.seq_lens
        )
        keys = (
            (name, dtype, args.batch_size, 1, *shape, args.causal)
            for dtype, name, *shape in combinations
        )
        return [Cell(rows=[dict(zip(KEY, key, strict=True))]) for key in keys]

    def measure(self, cell: Cell) -> list[dict]:
        (spec,) = cell.rows
        prediction = self.predict(predicted_or_refused, spec, self.device.device)
        if isinstance(prediction, str):
            return [spec | {"status": "skipped", "reason": prediction}]
        work = (
            measure_attention,
            spec,
            self.args.device,
            self.args.repetitions,
            self.args.warmup_steps,
        )
        peak = prediction["predicted_peak_bytes"]
        outcome, columns = self.measure_in_process(peak, *work, precision=spec["dtype"])
        return [spec | prediction | (columns or {}) | outcome]

    def report(self) -> Report:
        growth = results.growth_rows(self.rows)
        sections = results.sections(self.rows, growth, self.available_bytes)
        return Report(
            self.finding(results.finding, growth), sections, self.figure(), {"growth": growth}
        )

    def figure(self):
        """For the first head dimension and data type with a prediction."""
        from studies.attention.figure import attention_figure

        first = next((row for row in self.rows if row["predicted_memory_bytes"]), None)
        if first is None:
            return None
        some = [
            row
            for row in self.rows
            if (row["d_head"], row["dtype"]) == (first["d_head"], first["dtype"])
        ]
        about = (
            f"batch {first['batch_size']}, d_head {first['d_head']}, {first['dtype']}, on"
            f" {self.device.name}"
        )
        return attention_figure(sorted(some, key=lambda row: row["seq_len"]), about)
