"""What stands behind the texts: their commands run, their worksheets filled and checked, their numbers computed."""
