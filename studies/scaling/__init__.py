"""Weak and strong scaling over ranks and modes beside the prediction; inserted faults."""
