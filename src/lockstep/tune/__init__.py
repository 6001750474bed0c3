"""Which micro-batch fits, and which is the quickest, while the rows of a step stay the same."""
