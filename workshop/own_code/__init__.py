"""Is code right that a learner has written?  It runs in a process of its own, with a time limit."""
