"""Whole copies of a model on every rank, whose gradients are averaged."""
