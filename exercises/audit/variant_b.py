"""Backward pass and optimizer are submitted to a queue, so that the host need not wait for them
within the step."""

from collections import deque
from collections.abc import Callable
from functools import partial

from torch import Tensor

from harness.model.grad_clip import clip_gradients


def train(
    state, stream, num_steps: int, micro_steps: int, grad_clip: float | None, meter, instruments
) -> None:
    """The loop of tiny_llama_v1.py.  On a GPU the queue would be its stream;
    here the host works it off."""
    model, optimizer, scaler, autocast = state
    queue: deque[Callable[[], object]] = deque()

    def work_off() -> None:
        while queue:
            queue.popleft()()

    def backward(loss: Tensor) -> None:
        scaler.scale(loss / micro_steps).backward()

    def update() -> None:
        if grad_clip is not None:
            scaler.unscale_(optimizer)
            meter.add_grad_norm(clip_gradients(optimizer, grad_clip))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    for step in range(1, num_steps + 1):
        with meter.step(step), instruments.step(step):
            for _ in range(micro_steps):
                with meter.phase("data"):
                    input_ids, labels = next(stream)
                with meter.phase("forward"), instruments.forward(step), autocast:
                    loss = model(input_ids, labels)[1]
                with meter.phase("backward"):
                    queue.append(partial(backward, loss))
                    if step == 1:  # warm-up
                        work_off()
                meter.add_loss(loss)
            with meter.phase("optimizer"):
                queue.append(update)
                if step == 1:
                    work_off()
        work_off()
