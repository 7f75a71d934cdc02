"""What does every command need?  Units, errors, lines and tables on the screen, flags, files."""
