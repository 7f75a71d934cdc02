"""Flags, aliases, and every way to get them wrong."""

import re
from dataclasses import fields

import pytest
import torch
from helpers import PROJECT

import tiny_llama_v1 as tiny_llama
from harness.machine import devices
from harness.run.flag_combinations import PredictionConfig, only_predicted


def resolved(*flags: str):
    return tiny_llama.resolve(tiny_llama.build_parser().parse_args(flags))


FLAGS = {  # every flag that users rely on; a change here is a change of what was promised
    "--batch-size --seq-len --num-steps --learning-rate --device --vocab-size --hidden-dim"
    " --n-layers --num-layers --n-heads --num-heads --n-kv-heads --intermediate-dim --size --data"
    " --seed --deterministic --gradient-accumulation-steps --precision --attention --compile"
    " --activation-checkpointing --optimizer-impl --use-amp --enable-pytorch-profiler --profile-dir"
    " --profile-steps --warmup-steps --profile-memory --enable-memory-profiling --profile-stacks"
    " --profile-operators --gzip --memory-snapshot --system-profiler --enable-deepspeed-flops"
    " --flops-profile-step --peak --enable-all-profiling --output-dir --log-interval"
    " --validate-setup --dry-run --device-memory --force --target-device --parallel --bucket-mb"
    " --gradient-as-bucket-view --no-gradient-as-bucket-view --param-precision --fsdp-reshard"
    " --no-fsdp-reshard --fsdp-wrap --reduce-precision --world-size --network --measured"
    " --no-sync-steps"
    " --verbose --fused-projections --fused-norm --fused-rope --kernels --fused-loss"
    " --compile-mode --cuda-graphs --workload --grad-clip"
}


def test_all_flags_are_there():
    known = set(tiny_llama.build_parser()._option_string_actions)
    assert known - {"-h", "--help"} == set(" ".join(FLAGS).split())


def test_defaults():
    workload, profiling = resolved()
    config, training = workload.config, workload.training
    assert (config.vocab_size, config.hidden_dim, config.n_layers, config.n_heads) == (
        1000,
        256,
        4,
        8,
    )
    assert (config.n_kv_heads, config.intermediate_dim, config.max_seq_len) == (4, 512, 128)
    assert (training.batch_size, training.seq_len, training.num_steps, training.learning_rate) == (
        8,
        128,
        50,
        1e-4,
    )
    assert (training.seed, training.precision, training.device, training.log_interval) == (
        42,
        "fp32",
        "auto",
        1,
    )
    assert (profiling.profile_steps, profiling.warmup_steps, profiling.flops_profile_step) == (
        5,
        5,
        10,
    )
    assert not profiling.enabled


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--num-layers 3 --num-heads 4", {"n_layers": 3, "n_heads": 4, "n_kv_heads": 2}),
        ("--n-heads 1", {"n_kv_heads": 1}),
        ("--hidden-dim 512", {"intermediate_dim": 1024}),
        (
            "--size small",
            {"hidden_dim": 512, "intermediate_dim": 1104, "seq_len": 256, "num_steps": 50},
        ),
        (
            "--size med --seq-len 64",
            {"hidden_dim": 1024, "n_layers": 12, "seq_len": 64, "batch_size": 16},
        ),
        ("--size xl", {"hidden_dim": 4096}),
        ("--size verylarge --n-layers 1", {"hidden_dim": 4096, "n_layers": 1}),
        ("--use-amp", {"precision": "bf16"}),
        ("--num-steps 120", {"log_interval": 3}),  # 50 lines at most
        (
            "--num-steps 21 --profile-memory",
            {"log_interval": 2},
        ),  # beside what the instruments print, 20
        ("--num-steps 120 --log-interval 1", {"log_interval": 1}),
        ("--enable-memory-profiling", {"profile_memory": True}),
        (
            "--enable-all-profiling",
            {"profile_memory": True, "enable_deepspeed_flops": True, "profile_stacks": True},
        ),
        ("--learning-rate=3e-4", {"learning_rate": 3e-4}),
    ],
)
def test_flags_reach_the_configuration(flags, expected):
    workload, profiling = resolved(*flags.split())
    values = vars(workload.config) | vars(workload.training) | vars(profiling)
    assert expected == {name: values[name] for name in expected}


def test_help_names_every_flag_with_its_default(train):
    code, out, _ = train("--help")
    assert code == 0
    assert all(flag in out for flag in " ".join(FLAGS).split())
    assert "(256)" in out


WRONG = {
    "--num-steps 0": "--num-steps",
    "--batch-size -1": "--batch-size",
    "--batch-size 2.5": "--batch-size",
    "--batch-size two": "--batch-size",
    "--seq-len 0": "--seq-len",
    "--hidden-dim 100 --n-heads 8": "--hidden-dim 100",
    "--hidden-dim 24 --n-heads 8": "--hidden-dim 24",
    "--n-heads 8 --n-kv-heads 3": "--n-kv-heads 3",
    "--n-heads 4 --n-kv-heads 8": "--n-kv-heads 8",
    "--vocab-size 1": "--vocab-size",
    "--hidden-dim 100 --n-heads 8 --n-kv-heads 3": "--hidden-dim 100",  # the first of two
    "--use-amp --precision fp32": "--use-amp",
    "--size huge": "huge",
    "--precision int8": "int8",
    "--device tpu": "tpu",
    "--learning-rate 0": "--learning-rate",
    "--learning-rate nan": "--learning-rate",
    "--learning-rate inf": "--learning-rate",
    "--grad-clip 0": "--grad-clip: 0 is not a positive, finite number",
    "--grad-clip -1": "--grad-clip: -1 is not a positive, finite number",
    "--grad-clip nan": "--grad-clip: nan is not a positive, finite number",
    "--gradient-accumulation-steps 3": "--gradient-accumulation-steps 3",
    "--profile-steps 0": "--profile-steps",
    "--warmup-steps -1": "--warmup-steps",
    "--flops-profile-step 0": "--flops-profile-step",
    "--log-interval 0": "--log-interval",
    "--seed -1": "--seed",
    "--use-amp --precision fp16": "--use-amp",
    "--device-memory 80": "--device-memory: requires --dry-run",
    "--target-device MI300X": "--target-device: requires --dry-run",
    "--data missing.txt": "--data missing.txt",
    "--data .": "--data",
    "--data empty.txt": "--data empty.txt",
    "--data short.txt": "--data short.txt",
    "--data binary.dat": "--data binary.dat",
    "--data text.txt --vocab-size 64": "--vocab-size 64",
    "--num-steps": "--num-steps",
    "--num-step 5": "did you mean --num-steps?",
    "--hiden-dim 64": "did you mean --hidden-dim?",
    "surplus": "surplus",
}


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_arguments_are_one_line_and_exit_2(train, tmp_path, flags):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("a few bytes")
    (tmp_path / "binary.dat").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "text.txt").write_text("all lower and UPPER case letters " * 9)
    before = set(tmp_path.iterdir())
    code, out, err = train(*flags.split(), "--output-dir", "run")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert WRONG[flags] in err
    assert set(tmp_path.iterdir()) == before


def test_every_flag_of_a_prediction_requires_a_dry_run():
    for one in fields(PredictionConfig):
        assert only_predicted({one.name: 1}) == [f"--{one.name.replace('_', '-')}"]


def test_tf32_needs_a_gpu(train, tmp_path):
    code, _, err = train("--device", "cpu", "--precision", "tf32", "--output-dir", "run")
    assert code == 2
    assert re.search(r"--precision tf32: .*use fp32", err)
    assert not list(tmp_path.iterdir())


def test_fp16_on_a_cpu_that_cannot(train, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "cpu_trains_in_fp16", lambda: False)
    code, _, err = train("--device", "cpu", "--precision", "fp16", "--output-dir", "run")
    assert code == 2
    assert re.search(r"--precision fp16: .*use fp32 or bf16", err)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(train, tmp_path):
    code, out, err = train("--device", "cuda", "--output-dir", "run")
    assert (code, out) == (1, "")
    assert "--device cuda" in err
    assert "--device cpu" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["--flops-profile-step 99", "--flops-profile-step 3 --num-steps 2"]
)
def test_flops_step_beyond_the_run_is_moved(train, flags):
    code, out, _ = train("--enable-deepspeed-flops", *flags.split())
    assert code == 0
    assert "FLOPs profile moved" in out


def test_one_token_sequences(train):
    code, out, _ = train("--seq-len", "1")
    assert code == 0
    assert "nan" not in out


@pytest.mark.parametrize("flag", ["--output-dir", "--profile-dir"])
def test_folder_that_is_a_file(train, tmp_path, flag):
    (tmp_path / "file").write_text("kept")
    code, out, err = train("--enable-pytorch-profiler", flag, "file")
    assert (code, out) == (1, "")
    assert "cannot write to folder file" in err
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("package", "flags"),
    [
        ("deepspeed", "--enable-deepspeed-flops"),
        ("tensorboard", "--enable-pytorch-profiler"),
        ("tensorboard", "--output-dir run"),
    ],
)
def test_missing_packages_are_named_before_training(train, tmp_path, without, package, flags):
    without(package)
    code, out, err = train(*flags.split())
    assert (code, out) == (1, "")
    assert f"pip install {package}" in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_plain_run_needs_neither(train, without):
    without("deepspeed", "tensorboard", "torch_tb_profiler", "matplotlib")
    assert train()[0] == 0


def test_validate_setup(train):
    code, out, _ = train("--validate-setup", "--num-steps", "77")
    assert code == 0
    assert re.search(r"^torch +\d", out, re.M)
    assert "Step 3/3" in out
    assert "Setup is valid" in out


def test_validate_setup_fails_when_training_does(train, monkeypatch):
    monkeypatch.setattr(tiny_llama.TinyLlamaModel, "forward", lambda *a: 1 / 0)
    code, out, _ = train("--validate-setup")
    assert code == 1
    assert "Setup is valid" not in out


SIZES = [*tiny_llama.SIZES]


@pytest.mark.parametrize(
    ("text", "sizes"), [("docs/commands.md", SIZES[:5]), ("docs/sweeps.md", SIZES)]
)
def test_sizes_in_the_texts_are_those_of_the_code(text, sizes):
    text = (PROJECT / text).read_text()
    for name in sizes:
        row = tiny_llama.SIZES[name]
        workload, _ = resolved("--size", name)
        cells = [
            name,
            *(
                f"{row[k]:,}"
                for k in ("hidden_dim", "n_layers", "n_heads", "n_kv_heads", "intermediate_dim")
            ),
        ]
        cells += [f"{row[k]:,}" for k in ("seq_len", "batch_size", "num_steps")]
        cells += [f"{workload.parameter_count():,}", f"{workload.forward_flops():,}"]
        assert "| " + " | ".join(cells) + " |" in text
