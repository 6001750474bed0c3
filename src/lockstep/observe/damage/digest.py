"""64 bits that tell of a tensor whether any of its bits changed, and whether elements changed places.

The bytes are read as 64-bit words w[r, c] in rows of ``COLUMNS``. The digest is the sum of a[r] b[c] w[r, c] modulo
2^64, with fixed odd a and b: odd numbers can be divided by, so one changed word always changes it. Two words that
change places do so unless (a[r] b[c] - a[s] b[d]) times their difference is a multiple of 2^64, which of random
factors one in about 2^32 is. It is no cryptographic hash: it finds accidents, not forgeries.
"""

from __future__ import annotations

import torch

COLUMNS = 4096
CHUNK_ROWS = 256
"""Rows that are multiplied at a time: 8 MiB of words."""

_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Digester:
    """Digests of tensors; keeps the factors on each device that it met."""

    def __init__(self) -> None:
        self._columns: dict[torch.device, torch.Tensor] = {}
        self._rows: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def digest(self, tensor: torch.Tensor) -> torch.Tensor:
        """0-d int64 on the tensor's device; equal for equal bits in equal order, whatever their strides."""
        words = _words(tensor)
        full = words.numel() // COLUMNS
        columns, rows = self._factors(words.device, full + 1)
        rest = words[full * COLUMNS :]
        total = (rest * columns[: rest.numel()]).sum() * rows[full]
        if full:
            matrix = words[: full * COLUMNS].view(full, COLUMNS)
            for start in range(0, full, CHUNK_ROWS):
                chunk = matrix[start : start + CHUNK_ROWS]
                of_columns = (chunk * rows[start : start + len(chunk), None]).sum(0)
                total = total + (of_columns * columns).sum()
        return total

    def _factors(self, device: torch.device, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._columns:
            self._columns[device] = factors(COLUMNS, 1, device)
        known = self._rows.get(device)
        if known is None or known.numel() < rows:
            self._rows[device] = known = factors(max(rows, 1024), 2, device)
        return self._columns[device], known


def factors(count: int, series: int, device: torch.device) -> torch.Tensor:
    """``count`` odd numbers (int64) that look random: the i-th is the same on every device, for every count.

    Reference: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014 (SplitMix64).
    """
    add, first, second = (value - 2**64 if value >= 2**63 else value for value in _MIX)
    x = (torch.arange(count, dtype=torch.int64, device=device) + (series << 32)) * add
    x = (x ^ _shift(x, 30)) * first
    x = (x ^ _shift(x, 27)) * second
    return (x ^ _shift(x, 31)) | 1


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros: that of int64 repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as 64-bit words, the last one filled up with zeros; a view where that is possible."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    if whole == data.numel():
        return words
    last = data.new_zeros(8)
    last[: data.numel() - whole] = data[whole:]
    if not whole:
        return last.view(torch.int64)
    return torch.cat((words, last.view(torch.int64)))
