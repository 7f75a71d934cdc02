"""Runs and checks the documentation: its commands, its worksheets, its numbers."""
