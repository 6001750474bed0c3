"""What a run does, in numbers: measured in every step, written to the run's folder."""
