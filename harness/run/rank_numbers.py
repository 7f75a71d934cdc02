"""Do the ranks of one of our runs train one model?  A few numbers of what each has, in the first
step and after the last one; they are compared as those of a program of somebody else's."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from harness.instruments.first_step import unobserved
from harness.program.hooks.observing.rank_sketches import (
    Inputs,
    of_mesh,
    row_of,
    state_of_random_numbers,
    tensors_in,
    wrappers_of,
)
from harness.session.session import Session

FIRST = "1"


class RankNumbers:
    """Of this rank's parameters, gradients, optimizer state and batches; of a run of one rank none.

    Gradients are seen as the first step's optimizer phase begins, outside of the steps that are
    averaged; parameters and the optimizer's state then, too, and once the last step is over;
    batches as the first step takes them.
    """

    def __init__(self, session: Session):
        # It holds a model that must not outlive its process group.
        self._session = weakref.ref(session)
        self.rows: dict[str, list[dict]] = {}  # by step, in the order of the model's parameters
        self.random: dict[str, int] = {}  # by step: what the next random numbers depend on
        self.inputs = Inputs()
        if session.world_size > 1:
            session.stream = self._noted(session.stream)
            session.audit.before_optimizer = self.look_at_first_step

    @property
    def session(self) -> Session:
        """None once it is gone."""
        return self._session()

    def _noted(self, stream: Iterator) -> Iterator:
        """The stream.  Of later steps only whether their batches are those of before."""
        for batch in stream:
            if FIRST not in self.rows:
                with unobserved():
                    self.inputs.note(tensors_in(batch))
            elif self.inputs.is_repeated is not False:
                self.inputs.note_repeated(tensors_in(batch))
            yield batch

    def look_at_first_step(self) -> None:
        """Of a step with several optimizer phases, the last counts."""
        self._look(FIRST)

    def look_at_the_end(self, num_steps: int) -> None:
        """After the last of num_steps steps, of which no gradients are left to see."""
        if self.session.world_size == 1:
            return
        first = self.rows.get(str(num_steps))  # of a run of one step
        with unobserved():
            self._look(str(num_steps), has_gradients=False)
        if first:
            for row, seen in zip(self.rows[FIRST], first, strict=True):
                row.update(gradient=seen["gradient"], norm=seen["norm"])

    def _look(self, step: str, has_gradients: bool = True) -> None:
        state = self.session.optimizer.state
        self.rows[step] = [
            row_of(p, state.get(p, {}), has_gradients) for p in self._parameters().values()
        ]
        self.random[step] = state_of_random_numbers()

    def _parameters(self) -> dict[str, Tensor]:
        return dict(self.session.model.named_parameters())

    def as_json(self) -> dict:
        """What `harness.program.ranks` compares; reductions are the run's own, and not looked
        at."""
        model = self.session.state.model
        wrapped = wrappers_of([model] if isinstance(model, torch.nn.Module) else [])
        parameters = []
        for name, p in self._parameters().items():
            why, ranks = wrapped.get(id(p)) or of_mesh(p)
            parameters.append({"name": name, "why": why, "ranks": ranks})
        return {
            "parameters": parameters,
            "steps": self.rows,
            "models": [],
            "data": [self.inputs.as_json(list(range(self.session.world_size)))],
            "collectives": [],
            "random": self.random,
            "repeated_orders": [],
        }
