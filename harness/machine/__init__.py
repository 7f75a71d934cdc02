"""What machine is this, and what else happens on it?  Devices, drivers, set-up, disturbance."""
