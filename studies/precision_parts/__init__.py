"""How far do number formats reach, and what does rounding in them do to sums?"""
