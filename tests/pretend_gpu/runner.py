"""Runs commands of the project on pretended cards.  Reads a request a line, as JSON: card, module,
flags, folder, variables; runs it in the folder, its output in output.log there; answers with the
exit code.

torch and the project are imported once, with all that is slow to import: each command is a fork,
which puts its card into torch, and so is each row of a sweep.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys

MODULES = (
    "tiny_llama_v1 run_pytorch_profiler run_deepspeed_flops run_study launch_performance_study"
    " compare_runs "
    "studies.memory studies.timing studies.precision studies.attention"
    " studies.training "
    "studies.optimization analysis.diagnosis.document "
    "analysis.report.html "
    "analysis.prediction.document analysis.commands.run_explanations"
    " analysis.commands.analyze_traces "
    "analysis.commands.flops_command analysis.report.figures.comparison"
    " harness.model.decoder.memory "
    "analysis.hardware.rate_limits "
    # What commands import late.  Not DeepSpeed: it looks for a GPU as it is imported.
    "torch._dynamo torch.utils.tensorboard matplotlib.pyplot matplotlib.backends.backend_agg"
    " tabulate"
).split()
TIME_LIMIT_S = 240  # of a command, on a machine with much else to do


def run(card: str, module: str, flags: list[str], folder: str, variables: dict[str, str]) -> int:
    """In the fork."""
    os.setsid()
    signal.alarm(TIME_LIMIT_S)
    os.chdir(folder)
    log = os.open("output.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(variables | {"PRETEND_GPU": card})
    import pretended
    from helpers import exit_code

    from harness.ranks.failures import exit_code_of

    pretended.install()
    # A fork server of its own would import PyTorch for each command, which takes longer than all
    # its rows; this process has imported it and used no device.  tests/test_sweep_process.py has
    # the real fork server.
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method: context(
        "fork" if method == "forkserver" else method
    )
    sys.argv = [f"{module}.py", *flags]
    main = sys.modules[module].main
    code = exit_code(main if module == "tiny_llama_v1" else lambda: exit_code_of(main))
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    from harness.run.startup import begin_command

    begin_command()
    from analysis.hardware import measuring
    from tests.warm_python.server import prepare_predictions

    # What is measured of a card here is a figure of this CPU: briefly, only to have one.
    measuring.SECONDS, measuring.SQUARES["cuda"], measuring.COPIED_BYTES["cuda"] = (
        0.01,
        (128, 256),
        2**22,
    )
    for name in MODULES:
        importlib.import_module(name)
    # What the size `tiny` is here: a step of any size asks the same of a card, and each of its
    # operators costs CPU time.
    sys.modules["tiny_llama_v1"].SIZES["tiny"] |= {
        "hidden_dim": 32,
        "n_layers": 1,
        "n_heads": 4,
        "n_kv_heads": 2,
        "intermediate_dim": 64,
        "vocab_size": 64,
    }
    prepare_predictions()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(run(**request))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(
                child, signal.SIGKILL
            )  # rows that a command left, which the time limit has ended
        print(code, flush=True)


if __name__ == "__main__":
    main()
