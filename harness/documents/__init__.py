"""What stands in the documents of analyses, sweeps and exercises?  Fields, units, and reasons for \
null."""
