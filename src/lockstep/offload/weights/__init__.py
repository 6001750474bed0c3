"""Weights that are brought to the device before they are used, and let go after it."""
