"""Times that bound what is measured, for the hooks and for the tool that waits for them."""

LONG_S = 20.0  # of timed steps, or of recorded ones: then there are fewer
GRACE_S = 20.0  # for other ranks to write, and for what waits for the processes that we ended
