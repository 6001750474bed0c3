"""What a run will need, by arithmetic alone: nothing here runs a model, and importing it does not import torch."""
