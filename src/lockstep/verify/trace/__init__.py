"""The tensors of a run: their names, a file of them, and how far another run's are from it."""
