"""What do all sweeps share?  A process for each row, rows saved at once, flags and tables."""
