"""Reads what runs and profilers wrote, and explains it.  Nothing heavy is imported until a module is."""

SORT_KEYS = ("self_cpu", "cpu", "self_device", "device", "calls", "flops", "bytes")  # of operators
