"""Where a run's numbers go: TensorBoard, JSON lines, hosted services, the user's own classes."""
