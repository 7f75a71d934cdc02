"""Which changes make a program faster, and train it the same?  Each is audited, then timed."""
