"""Accelerate's YAML and flags, and its modules under the name ``accelerate`` (``install``)."""

from lockstep.compat.accelerate.alias import install

__all__ = ["install"]
