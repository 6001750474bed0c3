"""Whether a split model computes what the whole one does: both run on the same batch, and are compared."""
