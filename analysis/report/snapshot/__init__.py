"""How is a snapshot of memory shown?  Memory over time, and the page of a file of its own."""
