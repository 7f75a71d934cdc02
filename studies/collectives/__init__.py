"""Latency and bandwidth of all-reduce and other collectives, by bytes and ranks."""
