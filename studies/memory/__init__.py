"""How does the peak memory of a step grow with batch size and sequence length?"""
