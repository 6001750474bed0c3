"""A user's script, run as it is in processes of its own: by `lockstep check` and `lockstep tune`."""
