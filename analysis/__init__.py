"""Analyzes what runs and profilers wrote.  This file imports nothing, because PyTorch and pandas \
are slow to load."""

SORT_KEYS = (
    "self_cpu",
    "cpu",
    "self_device",
    "device",
    "calls",
    "flops",
    "bytes",
)  # of tables of operators
