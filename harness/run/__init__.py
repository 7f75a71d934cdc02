"""What happens during a run?  Its clock, its instruments, its checks, and what it writes."""
