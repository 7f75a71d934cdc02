"""What any measured run needs: devices, clocks, profilers, files, errors.  Knows no model; imports nothing above it."""
