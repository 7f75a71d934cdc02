"""--dry-run: a prediction instead of a run."""

import argparse
import sys
from pathlib import Path

from analysis.hardware.matching import rows_named
from analysis.prediction.document import predict
from analysis.prediction.text import prediction_lines
from harness.base.console import is_first_rank, say
from harness.base.files import prepare_folder, write_json
from harness.instruments.schedule import ProfilerConfig
from harness.machine.devices import check_precision, choose_device
from harness.machine.hardware_seen import unseen_hardware
from harness.model.workload import Workload, check_shards


def dry_run(workload: Workload, profiling: ProfilerConfig, args: argparse.Namespace) -> None:
    """Print what a step of the workload will need, and write prediction.json if there is a folder.

    args: the flags of harness.run.flag_combinations.PredictionConfig,
    and --verbose.  Raises UserError.
    """
    training = workload.training
    targets = [] if args.target_device is None else rows_named(args.target_device)
    device = choose_device("cpu" if targets else training.device)
    if not targets:  # a datasheet tells whether it has the precision
        check_precision(training.precision, device)
    if not is_first_rank():  # every rank would predict the same
        return
    check_shards(workload)
    prediction = predict(
        workload, device, profiling.peak, args.device_memory, targets, args.network, args.measured
    )
    typed = [Path(sys.argv[0]).name, *sys.argv[1:]]
    lines = prediction_lines(prediction, args.verbose, typed)
    unseen = unseen_hardware() if device.type == "cpu" else None
    if unseen:
        lines.insert(0, f"Warning: {unseen}")
    folder = training.output_dir or profiling.profile_dir
    if folder:
        prepare_folder(Path(folder))
        file = Path(folder) / "prediction.json"
        write_json(file, prediction)
        lines.insert(0, f"Files: {file}")
    say(*lines)
