"""What recipes compute, each once more in plain torch on one process."""
