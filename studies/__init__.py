"""Sweeps: many measurements under the same conditions, each row of a table predicted, run and kept.

`sweep.py` is what they share.  They stand on the training script and on `analysis`, and the commands stand on them.
"""
