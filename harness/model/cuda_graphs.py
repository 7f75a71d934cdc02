"""Forward and backward pass as CUDA graphs: two launches instead of hundreds, for steps that wait
for launches."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from harness.model.workload import TrainingState, Workload


def captured(workload: Workload, state: TrainingState, stream: Iterator) -> TrainingState:
    """The state whose model replays its passes, captured with a batch of the stream.  In
    workload.step_settings(): a graph keeps the kernels that it was captured with."""
    return state._replace(model=GraphedModel(workload, state, stream))


class LossOf(nn.Module):
    """The loss alone: whatever else the model returns would be kept for each replay."""

    def __init__(self, workload: Workload, model: nn.Module):
        super().__init__()
        self.workload, self.model = workload, model

    def forward(self, *batch: Tensor) -> Tensor:
        return self.workload.loss(self.model, batch)


class GraphedModel(nn.Module):
    """Replays the captured passes for batches of the shape they were captured with;
    returns (None, loss)."""

    def __init__(self, workload: Workload, state: TrainingState, stream: Iterator):
        super().__init__()
        with state.autocast:  # without its cache, whose tensors would be gone at a replay
            # Three passes to warm up, whose gradients are discarded, then the capture.
            self.loss = torch.cuda.make_graphed_callables(
                LossOf(workload, state.model), tuple(next(stream))
            )

    def forward(self, *batch: Tensor) -> tuple[None, Tensor]:
        return None, self.loss(*batch)
