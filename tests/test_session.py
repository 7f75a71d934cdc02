"""A training step is made ready in one place: in one order, under settings of its own; and what it
cannot be given is an error."""

import contextlib
import dataclasses

import pytest
import torch

from harness.base.errors import UserError
from harness.instruments import compilation
from harness.instruments.timing import NullMeter
from harness.session.session import Preparation, Session
from tiny_llama_v1 import TinyLlamaConfig, TinyLlamaWorkload, TrainingConfig

CPU = torch.device("cpu")
CONFIG = TinyLlamaConfig(50, 32, 1, 4, 2, 48, max_seq_len=8)
PLAIN = TinyLlamaWorkload(CONFIG, TrainingConfig(batch_size=2, seq_len=8, num_steps=2))


def settings_of_process() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()


def losses(session: Session, steps: int) -> list[float]:
    return [record.loss for record in session.timed(steps).records]


def test_sessions_take_turns_each_under_its_own_settings_and_with_its_own_batches():
    alone = losses(Session(PLAIN, CPU), 3)
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Watched(TinyLlamaWorkload):
        def train(self, *arguments) -> None:
            seen.append((self.training.deterministic, *settings_of_process()))
            super().train(*arguments)

    sessions = [
        Session(Watched(CONFIG, dataclasses.replace(PLAIN.training, deterministic=asked)), CPU)
        for asked in (False, True)
    ]
    together = [[losses(session, 1)[0] for session in sessions] for _ in range(3)]
    assert [first for first, _ in together] == alone
    assert seen == [(asked, "highest", asked) for asked in (False, True)] * 3
    assert settings_of_process() == ("highest", False)


def test_settings_are_in_force_in_the_block_and_not_after_it():
    session = Session(PLAIN.with_settings(deterministic=True), CPU)
    assert not torch.are_deterministic_algorithms_enabled()
    with session:
        assert torch.are_deterministic_algorithms_enabled()
        session.step()
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_compiling_is_timed_apart_and_takes_no_batch_from_the_steps(traced_graphs):
    told = []
    session = Session(
        PLAIN.with_settings(compile=True), CPU, preparation=Preparation(tell=told.append)
    )
    assert len(traced_graphs) == 1 and told == ["Compiling the model..."]
    assert session.compile_seconds > 0
    assert losses(session, 2) == pytest.approx(losses(Session(PLAIN, CPU), 2), abs=1e-6)
    assert len(traced_graphs) == 1  # no step compiles anything
    assert Session(PLAIN, CPU).compile_seconds is None


def test_a_forward_pass_alone_is_compiled_as_such(traced_graphs):
    preparation = Preparation(trains=False)
    session = Session(PLAIN.with_settings(compile=True), CPU, preparation=preparation)
    with torch.no_grad():
        PLAIN.loss(session.state.model, next(session.stream))
    assert len(traced_graphs) == 1  # one with gradients would be another
    assert all(parameter.grad is None for parameter in session.model.parameters())


def test_steps_are_timed_tracked_and_audited():
    session = Session(PLAIN, CPU)
    assert session.first_step is None
    session.step(NullMeter(), session.audit)
    names = [name for name, _ in session.model.named_parameters()]
    assert [*session.first_step.norms] == names and not session.first_step.unmoved
    times = session.times(2)
    assert len(times) == 2 and min(times) > 0
    parameters = sum(parameter.nbytes for parameter in session.model.parameters())
    assert session.peak_bytes() > 4 * parameters  # with gradients and the optimizer's two
    assert session.losses[-1].ndim == 0


def test_what_is_changed_is_changed_before_it_is_compiled(traced_graphs):
    order = []
    preparation = Preparation(
        change_model=lambda model: order.append(("changed", len(traced_graphs))),
        wrap=lambda state: order.append(("wrapped", len(traced_graphs))) or state.model,
    )
    Session(PLAIN.with_settings(compile=True), CPU, preparation=preparation)
    assert order == [("changed", 0), ("wrapped", 1)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "tf32"}, "--precision tf32: TF32 exists only in"),
        ({"parallel": "ddp", "world_size": 2}, "--parallel ddp: this process is no rank of a run"),
    ],
)
def test_what_a_session_cannot_give_is_an_error(settings, words):
    with pytest.raises(UserError, match=words):
        Session(PLAIN.with_settings(**settings), CPU)
    assert settings_of_process() == ("highest", False)


def test_a_model_of_another_kind_is_not_captured():
    @dataclasses.dataclass(frozen=True)
    class Other(TinyLlamaWorkload):
        can_be_captured = False

    workload = Other(CONFIG, dataclasses.replace(PLAIN.training, cuda_graphs=True))
    with pytest.raises(UserError, match="--cuda-graphs: only the model of this workshop"):
        Session(workload, CPU)


def test_memory_of_compiled_code_is_not_guessed(traced_graphs):
    session = Session(PLAIN.with_settings(compile=True), CPU)
    with pytest.raises(UserError, match="runs no separate operators"):
        session.peak_bytes()


def test_a_compiled_pass_is_no_part_of_the_time_that_the_compiler_takes(monkeypatch):
    times_ms = [10.0, 12.0, 11.0, 1005.0, 5.0, 4.0, 6.0]  # before, the first call, after
    monkeypatch.setattr(compilation, "time_synced", lambda call, device: times_ms.pop(0))
    monkeypatch.setattr(compilation, "compiling", lambda *told: contextlib.nullcontext())
    found = compilation.compile_and_time(lambda: None, lambda: None, CPU, "nothing")
    assert (found.uncompiled_ms, found.compiled_ms, found.compile_s) == (11.0, 5.0, 1.0)
    assert (times_ms, found.passes) == ([], 3)
