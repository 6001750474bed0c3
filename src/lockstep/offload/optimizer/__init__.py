"""Optimizers whose state, and gradients, rest outside of the device: their step, block by block, in the background."""
