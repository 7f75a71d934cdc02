"""What limits each slice of time?  Arithmetic or memory by the device's peaks, or what the GPU \
waited for."""
