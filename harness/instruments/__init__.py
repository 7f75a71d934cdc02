"""How is a step measured?  Its clock, its checks, and the instruments: profilers, \
memory tracker, compilation."""
