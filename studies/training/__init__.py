"""Time of forward, backward, optimizer and step, by size, length and precision."""
