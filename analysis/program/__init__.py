"""What does a program of somebody else's do beside its trace? Lines that take the host's time, \
and what happens in few steps."""
