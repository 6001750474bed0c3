"""What a run has written about itself, as it is read: its steps, its events, its starts, its goodput."""
