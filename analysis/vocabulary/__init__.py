"""What do other writers call it?  Canonical kinds of events, ranges, calls, collectives, \
operators and kernels."""
