"""Models, gradients and optimizer states that do not fit into the memory of the device."""
