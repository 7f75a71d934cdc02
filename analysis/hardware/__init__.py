"""How fast could this device be?  By its datasheet, and by what matmuls and copies reach here."""
