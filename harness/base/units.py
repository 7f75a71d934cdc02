"""Units: MB is 2^20 bytes everywhere, as in torch.cuda.memory_summary; GB/s are 10^9 bytes per second."""

MB = 2**20


def megabytes(size: float, digits: int = 1) -> str:
    """A size in bytes as '1,234.5 MB'."""
    return f"{size / MB:,.{digits}f} MB"
