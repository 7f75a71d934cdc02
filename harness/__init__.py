"""What any measured run needs: devices, clocks, profilers, files, errors.  Model-agnostic; imports nothing above it."""
