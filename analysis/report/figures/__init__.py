"""How is a figure drawn?  By matplotlib, once: all that shows it shows the same picture."""
