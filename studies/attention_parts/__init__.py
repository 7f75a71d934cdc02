"""Which implementations of attention are there, and what memory does each take?"""
