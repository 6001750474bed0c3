"""What other libraries' words mean here. The core imports it only when some of them are there."""
