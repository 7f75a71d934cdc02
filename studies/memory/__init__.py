"""Peak memory by batch size and sequence length: measured, predicted and fitted."""
