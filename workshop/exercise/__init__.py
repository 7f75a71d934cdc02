"""What is an exercise?  Its page, the commands on it, and the results that they leave."""
