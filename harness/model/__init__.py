"""What is trained?  A workload: a model, its data and its step, ours or in a file of the user's."""
