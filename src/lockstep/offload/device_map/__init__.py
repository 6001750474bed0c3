"""Which part of a model goes to which device, to host memory or to disk: decided by sizes, before anything moves."""
