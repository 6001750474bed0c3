"""The page: its sections, in the order in which they stand."""
