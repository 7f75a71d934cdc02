"""Sweeps: the same measurement for many settings, one row of a table each.  `sweep.py` is what all of them share."""
