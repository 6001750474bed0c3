"""Weights alone, as other libraries read them."""
