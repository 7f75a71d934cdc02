"""A loop of which torch.profiler records two steps."""

from torch.profiler import profile, schedule, tensorboard_trace_handler


def profile_steps(step, steps, folder):
    """Runs the steps, and leaves a trace in the folder."""
    with profile(
        schedule=schedule(wait=2, warmup=1, active=2, repeat=1),
        on_trace_ready=tensorboard_trace_handler(folder),
    ) as profiler:
        for _ in range(steps):
            step()
            profiler.step()
