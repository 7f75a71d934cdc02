"""What do operators and kernels do?  By their names alone; it knows no trace."""
