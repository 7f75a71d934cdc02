"""What bounds the step, and what would help?"""
