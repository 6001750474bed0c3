"""Accelerate's settings and plugin for FSDP."""
