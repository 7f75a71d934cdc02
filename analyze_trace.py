#!/usr/bin/env python3
__doc__ = """\
What limits the steps of a trace that torch.profiler recorded, of any program, and what to try.

python3 analyze_trace.py PATH [--output-dir DIR]    a trace, a folder of the traces of all ranks,
                                                    or the folder of a run
python3 analyze_trace.py SNAPSHOT [--compare OTHER] who held the memory: what
                                                    torch.cuda.memory._dump_snapshot() wrote

The same as run_pytorch_profiler.py --analyze-existing PATH --generate-report, into a folder of its
own.  Examples:

  python3 analyze_trace.py trace.json.gz            report.html in analysis_<timestamp>/
  python3 analyze_trace.py traces/ --output-dir result --verbose
                                                    of all ranks; prints the tables too
  python3 analyze_trace.py trace.json --slim small.json.gz
                                                    also writes a smaller one for viewers
"""

import importlib.util
from datetime import datetime
from pathlib import Path

from harness.run.startup import run_command

# Without PyTorch there is the answer, and no report.
PACKAGES = ["numpy", "pandas", "tabulate", "tqdm", "msgspec"]


def main() -> None:
    from analysis.commands.reading_flags import reading_of, reading_parser

    parser = reading_parser("analyze_trace.py", __doc__)
    parser.add_argument(
        "path",
        metavar="PATH",
        type=Path,
        help="a trace, a memory snapshot, a folder of these, or the folder of a run",
    )
    parser.set_defaults(generate_report=importlib.util.find_spec("torch") is not None)
    parser.set_defaults(output_dir=Path(f"analysis_{datetime.now():%Y%m%d_%H%M%S}"))
    args = parser.parse_args()
    reading = reading_of(args)
    from analysis.commands.analyze_traces import analyze_existing  # pandas takes long to import

    analyze_existing(
        args.path,
        args.output_dir,
        args.generate_report,
        args.top_n,
        args.sort_by,
        args.verbose,
        reading,
    )


if __name__ == "__main__":
    run_command(main, PACKAGES)
