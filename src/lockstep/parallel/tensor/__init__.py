"""Tensor parallelism: each rank holds a part of the matrices of a layer and computes a part of it."""

from __future__ import annotations
