"""Times that bound what is measured, for the hooks and for the tool that waits for them."""

LONG_S = 20.0  # of timed steps, or of recorded ones: then there are fewer
GRACE_S = 20.0  # for other ranks to write, and for what waits for the processes that we ended
EXIT_S = 300.0  # for what the program does at its end, with --then exit
UNSEEN_TOOL_S = 2.0  # for the tool to end what would go on, where it cannot be seen, as from within a container
CLEAN_UP_S = 2.0  # for processes that remove shared memory once those that used it are gone
SHORT_OF_MEMORY = 0.1  # of the host's memory available, or less: no further step is recorded
