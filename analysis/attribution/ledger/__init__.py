"""Whose is each slice of time?  Disjoint slices, each with its owner, or why nothing works."""
