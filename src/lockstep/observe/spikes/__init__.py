"""Steps whose loss or gradient norm jumps: all ranks leave them out, or stop before them."""
