"""Whose time is it?  Time of a step by part of the model, operator, kernel, \
collective and cause."""
