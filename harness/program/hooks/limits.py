"""Times that bound what is measured, for the hooks and for the tool that waits for them."""

LONG_S = 20.0  # of timed steps, or of recorded ones: then there are fewer
GRACE_S = 20.0  # for other ranks to write, and for what waits for the processes that we ended
EXIT_S = 300.0  # for what the program does at its end, with --then exit
FLUSH_S = 2.0  # for a script that started a process to be ended before that is
SHORT_OF_MEMORY = 0.1  # of the host's memory available, or less: no further step is recorded
