"""What would help, and how much at most?  Changes to try, each with its evidence in the trace and \
its bound."""
