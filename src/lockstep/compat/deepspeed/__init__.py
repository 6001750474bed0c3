"""DeepSpeed's JSON and plugin, and the optimizers and schedules that it describes."""
