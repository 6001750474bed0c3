"""Whether a run on many devices computes what one device computes."""
