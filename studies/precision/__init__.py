"""What does a precision change: time and memory of a step, data types, range and rounding?"""
