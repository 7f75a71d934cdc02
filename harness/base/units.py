"""Units: KB is 2^10 and MB 2^20 bytes everywhere, as in torch.cuda.memory_summary;
GB/s are 10^9 bytes per second."""

KB = 2**10
MB = 2**20


def memory_text(mb: float, digits: int = 1) -> str:
    """'135.8 MB', and from 2^30 bytes on '12.3 GB': for predictions of large models."""
    return f"{mb:,.{digits}f} MB" if abs(mb) < 1024 else f"{mb / 1024:,.1f} GB"


def rounded(value: float) -> str:
    """'12,300' for 12,345: three digits, for what is not known better."""
    return f"{float(f'{value:.3g}'):,.10g}"


def megabytes(size: float, digits: int = 1) -> str:
    """A size in bytes as '135.8 MB'; from 1,000 MB on without decimals."""
    return f"{size / MB:,.{digits if size < 1000 * MB else 0}f} MB"
