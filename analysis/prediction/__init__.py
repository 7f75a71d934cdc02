"""Will it fit, and how long will it take?  Asked before anything runs."""
