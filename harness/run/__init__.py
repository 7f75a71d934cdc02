"""What is a run, from its start to its end?  Which flags go together, what it \
prints and what it writes."""
