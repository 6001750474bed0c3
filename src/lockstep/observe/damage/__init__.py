"""Silent damage: replicas that differ, and gradients that are no numbers."""
