"""What do all sweeps share?  Flags, a process for each row, rows saved at once, tables, comparison of two sweeps."""
