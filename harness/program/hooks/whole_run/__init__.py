"""What does a whole run do? Every step timed in files that outlive the process, what makes some \
slow, what grows."""
