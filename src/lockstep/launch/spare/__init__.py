"""Spare processes: they have imported a script's libraries, and wait to become the workers of the next round."""
