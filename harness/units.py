"""Units: MB is 2^20 bytes everywhere, as in torch.cuda.memory_summary; GB/s are 10^9 bytes a second."""

MB = 2**20


def megabytes(size: float, digits: int = 1) -> str:
    """'1,234.5 MB' of a size in bytes."""
    return f"{size / MB:,.{digits}f} MB"
