"""Accelerate's YAML and flags."""
