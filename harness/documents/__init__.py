"""What stands in each JSON document?  Its fields, their units, and when they are null; \
docs/files.md is made of it."""
