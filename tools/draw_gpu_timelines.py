"""Draw exercises/pictures/gpu_timelines.png: launches and kernels of two stored traces of a GPU.

python3 tools/draw_gpu_timelines.py
"""

import gzip
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analysis.report.figures.axes import WIDTH, bare
from harness import PROJECT

STORED = PROJECT / "benchmarks" / "results" / "nvidia-h100-80gb-hbm3"
TRACES = {  # title and file, the launch-bound one first
    "default model: the GPU waits for launches": "default_trace_step_3_6.pt.trace.json.gz",
    "medium, bf16: the GPU is busy": "medium_bf16_sdpa_trace_step_3_5.pt.trace.json.gz",
}
SHOWN_MS = 2.0  # from the middle of the recorded kernels
ROWS = {  # categories of events, as torch.profiler names them, by the row that shows them
    "host: launches": "cuda_runtime",
    "GPU: kernels": "kernel",
}


def spans_in_ms(events: list[dict], category: str, start_us: float) -> list[tuple[float, float]]:
    """Start and length of the events of a category that overlap the window, in ms from its
    start."""
    spans = []
    for event in events:
        if event.get("cat") != category:
            continue
        begin_ms = (event["ts"] - start_us) / 1e3
        length_ms = event["dur"] / 1e3
        if begin_ms < SHOWN_MS and begin_ms + length_ms > 0:
            spans.append((begin_ms, length_ms))
    return spans


def main() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    for axes, (title, file) in zip(figure.subplots(2, 1), TRACES.items(), strict=True):
        with gzip.open(STORED / file, "rt") as lines:
            events = json.load(lines)["traceEvents"]
        starts_us = sorted(event["ts"] for event in events if event.get("cat") == "kernel")
        start_us = starts_us[len(starts_us) // 2]
        for place, (row, category) in enumerate(ROWS.items()):
            color = f"C{place}"
            spans = spans_in_ms(events, category, start_us)
            axes.broken_barh(spans, (1 - place - 0.35, 0.7), color=color, label=row)
        bare(axes)
        axes.set_xlim(0, SHOWN_MS)
        axes.set_yticks([1, 0], ROWS)
        axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(f"ms, {SHOWN_MS:g} of one step on an NVIDIA H100")
    figure.savefig(PROJECT / "exercises" / "pictures" / "gpu_timelines.png", dpi=100)


if __name__ == "__main__":
    main()
