"""How long does each phase of a step take, by size, precision, warm-up and compilation?"""
