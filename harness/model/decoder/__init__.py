"""Our LLaMA decoder in closed form: its FLOPs, parameters and saved tensors."""
