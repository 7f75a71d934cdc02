"""What does a setting change?  Sweeps: the same measurement for many settings, one \
row of a table each."""
