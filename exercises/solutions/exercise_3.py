"""What limits a matmul x @ w in float32, where x has [tokens, width] and w [width, width]."""


def flops_and_bytes(tokens, width):
    """x and w are read and the result is written, each once; a multiplication and an addition are
    two FLOPs."""
    flops = 2 * tokens * width * width
    return flops, 4 * (2 * tokens * width + width * width)


def regime(tokens, width, device):
    """launch, memory or compute: which of the three takes longest."""
    flops, moved_bytes = flops_and_bytes(tokens, width)
    seconds = {
        "launch": device.launch_s,
        "memory": moved_bytes / device.bytes_per_s,
        "compute": flops / device.flops_per_s,
    }
    return max(seconds, key=seconds.get)
