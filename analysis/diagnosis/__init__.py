"""What bounds the step?  The verdict, ranks that hold up others, and the document of all that a \
trace shows."""
