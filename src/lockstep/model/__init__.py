"""What is read from a user's modules: their blocks, what they hold, which of them are equal."""
