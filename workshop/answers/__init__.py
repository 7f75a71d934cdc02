"""The answers of each exercise, computed from the result folders that its commands leave."""
