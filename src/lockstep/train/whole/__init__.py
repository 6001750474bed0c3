"""Optimizers that look at more than single elements step on whole parameters, gradients and state."""
