"""Weights that come to an accelerator, and go."""
