"""What does a command end with?  The analysis that follows a run, or that is all of a command."""
