"""Checkpoints that other libraries pickled, read without unpickling them in this process."""
