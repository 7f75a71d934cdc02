"""How much work is a step?  FLOPs, bytes and tensors, counted on fake tensors or by formula."""
