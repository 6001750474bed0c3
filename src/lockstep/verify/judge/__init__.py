"""Whether two runs agree: how far rounding explains what they have, and what a difference looks like."""
