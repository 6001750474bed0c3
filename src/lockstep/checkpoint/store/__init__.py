"""Where checkpoints lie: local directories, and whatever fsspec opens."""
