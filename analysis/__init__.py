"""Reads what runs leave behind and explains it.  One module, one question."""
