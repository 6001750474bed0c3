"""One bad step again, in one process: which module was the first to go wrong."""
