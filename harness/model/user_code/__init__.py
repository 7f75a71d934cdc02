"""How does a step in a file of the user's train?  Imported, checked, run on fake tensors too."""
