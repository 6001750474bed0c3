"""Gradients that rest in a file."""
