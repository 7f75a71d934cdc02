"""Time and memory of attention alone, by implementation and sequence length."""
