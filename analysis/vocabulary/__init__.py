"""What do other writers call it?  Their names, and what they stand for here; it knows no trace."""
