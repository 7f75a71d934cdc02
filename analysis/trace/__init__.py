"""What happened?  A trace file as tables: events, steps, and links between host and GPU."""
