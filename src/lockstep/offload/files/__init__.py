"""Tensors in files: mapped, read and written past the page cache."""
