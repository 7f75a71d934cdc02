"""Every command of the project once, as a process, as small as it can be: it ends well and leaves
its file."""

import json
import sys
from pathlib import Path

import pytest
from helpers import PROJECT, REAL_PYTHON, SMALL_MODEL, finish, start, unregistered
from programs import PLAIN
from traces import SMALL, write_trace

from harness.study_files import document_of_study, study_names

TINY = "--size tiny --batch-size 1 --seq-len 8 --repetitions 2 --warmup-steps 1".split()
STEPS = ["--num-steps", "3"]
# A script, and which study; its flags, and a file that it leaves in the folder `out`; {here}: where
# prepared() puts what it reads.
COMMANDS = {
    "tiny_llama_v1.py": ([*SMALL_MODEL, *STEPS], "performance_summary.json"),
    "run_pytorch_profiler.py": ([*SMALL_MODEL, "--num-steps", "6"], "report.html"),
    "run_deepspeed_flops.py": ([*SMALL_MODEL, "--num-steps", "4"], "flops_profile.json"),
    "launch_performance_study.py": (["tiny", *SMALL_MODEL, *STEPS], "performance_summary.json"),
    "run_study.py memory": (
        [*SMALL_MODEL[:8], *STEPS, "--batch-sizes", "2", "--seq-lens", "16"], "memory_study.json",
    ),
    "run_study.py timing": (
        [*TINY, "--wrong-method-repetitions", "2", "--change=--attention sdpa"],
        "timing_study.json",
    ),
    "run_study.py precision": ([*TINY, "--precisions", "bf16"], "precision_study.json"),
    "run_study.py attention": (
        "--batch-size 1 --repetitions 2 --implementations eager --d-heads 16 --seq-lens 32".split(),
        "attention_benchmark.json",
    ),
    "run_study.py training": (
        ("--batch-size 1 --repetitions 2 --sizes tiny --seq-lens 8 --modes train"
         " --precisions fp32").split(),
        "training_benchmark.json",
    ),
    "run_study.py optimization": (
        ("--sizes tiny --batch-size 1 --seq-len 8 --repetitions 2 --rungs sdpa"
         " --no-reference").split(),
        "optimization_study.json",
    ),
    "run_study.py scaling": (
        ("--batch-size 1 --seq-len 8 --repetitions 1 --world-sizes 1 2 --parallel-modes ddp"
         " --scalings weak").split(),
        "scaling_study.json",
    ),
    "run_study.py collectives": (
        ["--world-sizes", "2", "--max-bytes", "1024"], "collective_benchmark.json",
    ),
    "compare_runs.py": (["{here}/one", "{here}/other"], "comparison.json"),
    "analyze_trace.py": (["{here}/trace.json"], "operator_analysis.json"),
    "profile_program.py": (["--", "{here}/train.py"], "program.json"),
    "prove_changes.py": (["--audit-only", "--try", "fused", "--", "{here}/train.py"], "proof.json"),
    "run_exercise.py": (["9", "--blank", "out"], "worksheet_9.md"),
}  # fmt: skip


def test_no_command_is_left_out():
    """A study that is not here has a test module of its own, which runs it."""
    scripts = {path.name for path in PROJECT.glob("*.py")} - {"run_study.py"}
    studies = {f"run_study.py {name}" for name in study_names()}
    assert scripts <= COMMANDS.keys() <= scripts | studies
    for name in study_names():
        module = PROJECT / "tests" / f"test_{document_of_study(name)}.py"
        assert module.exists(), module


def prepared(folder: Path) -> None:
    """Runs to compare, a trace and a program."""
    for name in ("one", "other"):
        (folder / name).mkdir()
        stored = PROJECT / "benchmarks" / "results" / "cpu-amd-epyc-2-threads" / "run_baseline.json"
        (folder / name / "performance_summary.json").write_text(stored.read_text())
    write_trace(folder / "trace.json", *SMALL)
    (folder / "train.py").write_text(PLAIN)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_well_and_leaves_its_file(tmp_path, known_peaks, name):
    flags, file = COMMANDS[name]
    prepared(tmp_path)
    words = [flag.format(here=tmp_path) for flag in flags]
    if name != "run_exercise.py":
        own = "--profile-dir" if name == "run_pytorch_profiler.py" else "--output-dir"
        words = [own, "out", *words]
    # One starts from nothing, as all do for a user.
    python = REAL_PYTHON if name == "tiny_llama_v1.py" else sys.executable
    script, *study = name.split()
    command = (python, str(PROJECT / script), *study, *words)
    code, out = finish(start(*command, cwd=tmp_path, env={"PAINT_FIGURES": "yes"}))
    assert code == 0, out
    assert "Traceback" not in out
    left = tmp_path / "out" / file
    assert left.stat().st_size > 0
    assert unregistered(tmp_path / "out") == []
    if left.suffix == ".json":
        json.loads(left.read_text())
    if study:
        of_study = {left.name, left.with_suffix(".md").name, "config.json"}
        assert of_study <= {path.name for path in left.parent.iterdir()}
