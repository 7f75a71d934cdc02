"""The same step timed correctly and in five wrong ways, and what each would conclude."""
