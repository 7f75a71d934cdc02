"""A pretend GPU: torch computes on the CPU, and everything that a program asks of torch.cuda is
answered as a card of cards.txt would.  CONTRIBUTING.md tells what this shows and what it cannot.

    cards      which card, and which faults, by environment variables
    allocator  the caching allocator, in numbers only
    clock      work that lags behind the host: events, waits, and copies that arrive late
    device     which tensors are on the GPU, and what that changes
    cuda       torch.cuda
    trace      GPU events in the traces of torch.profiler
    profiler   how nsys and rocprofv3 are told what to capture
"""


def install() -> None:
    """Put the card that PRETEND_GPU names into torch, for this process and those that it starts."""
    from pretended import cards, cuda, device, profiler, trace

    card = cards.chosen()
    if card and not cards.fault("unseen"):
        gpu = cuda.install(card)
        device.install(gpu)
        trace.install(card)
        profiler.install()
