"""Can it be believed?  What is missing from a trace, what disturbed a run, whether \
it trains the same."""
