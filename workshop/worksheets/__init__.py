"""Is a worksheet right?  Filled in from results, checked against them, compared within a class."""
