"""How is each file format read?  A module for each; all yield the same parts, of \
which a trace is made."""
