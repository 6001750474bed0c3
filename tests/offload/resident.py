"""Which bytes of mapped tensors are in this process's memory, as the kernel counts them."""

from __future__ import annotations

import mmap
import os
import struct

import torch


def resident_bytes(tensor: torch.Tensor) -> int:
    """Of the pages in which ``tensor`` lies, those that this process has in memory."""
    first = tensor.data_ptr() // mmap.PAGESIZE
    last = -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        entries = os.pread(pagemap.fileno(), 8 * (last - first), 8 * first)
    return mmap.PAGESIZE * sum(entry >> 63 for (entry,) in struct.iter_unpack("<Q", entries))
