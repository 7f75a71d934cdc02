"""Time and memory of a step by precision, data types under autocast, and rounding."""
