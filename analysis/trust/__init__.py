"""Can it be believed?  What is missing from a trace, and what disturbed a run."""
