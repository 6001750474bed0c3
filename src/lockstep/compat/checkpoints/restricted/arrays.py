"""Arrays, dtypes and scalars of NumPy, from the arguments and states that it pickles."""

from __future__ import annotations

import struct
from typing import Any

from .nodes import Array, ArrayType, Items, PickledItems, RefusedFile, Symbol, needs, sizes

_NUMBERS = {"b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q",
            "f2": "e", "f4": "f", "f8": "d"}  # fmt: skip


def array_type(arguments: PickledItems) -> ArrayType:
    """``numpy.dtype(code, align, copy)`` of plain numbers."""
    needs("numpy.dtype", 1 <= len(arguments) <= 3 and isinstance(arguments[0], str))
    if arguments[0] not in _NUMBERS:
        raise RefusedFile(f"it holds a NumPy array of {arguments[0][:40]!r}, but only plain numbers are read")
    return ArrayType(arguments[0])


def byte_order(state: Any) -> str:
    """From the state of a dtype; only little-endian is read."""
    needs("numpy.dtype", isinstance(state, Items) and len(state.items) >= 2)
    order = state.items[1]
    needs("numpy.dtype", order in ("<", "|", "="))
    return str(order)


def empty_array(arguments: PickledItems) -> Array:
    """``_reconstruct(ndarray, (0,), b"b")``, which BUILD fills."""
    needs("numpy _reconstruct", len(arguments) == 3 and isinstance(arguments[0], Symbol))
    needs("numpy _reconstruct", arguments[0].about == "array type")
    return Array()


def fill_array(array: Array, state: Any) -> None:
    """By the state ``(version, shape, dtype, is_fortran, data)``."""
    name = "numpy.ndarray"
    needs(name, isinstance(state, Items) and len(state.items) == 5)
    _, shape, dtype, fortran, data = state.items
    _set_array(array, shape, dtype, fortran, data)


def _set_array(array: Array, shape: object, dtype: Any, fortran: Any, data: Any) -> None:
    name = "numpy.ndarray"
    needs(name, isinstance(dtype, ArrayType) and isinstance(data, bytes) and isinstance(fortran, bool))
    array.shape = sizes(name, shape)
    count = 1
    for length in array.shape:
        count *= length
    if count * int(dtype.code[1:]) != len(data):
        raise RefusedFile(f"a NumPy array of shape {array.shape} has {len(data)} bytes")
    array.dtype, array.data, array.fortran = dtype.code, data, fortran


def array_of_buffer(arguments: list[object]) -> Array:
    """``numpy.core.numeric._frombuffer(buffer, dtype, shape, order)`` of protocol 5."""
    needs("numpy _frombuffer", len(arguments) == 4 and arguments[3] in ("C", "F"))
    array = Array()
    _set_array(array, arguments[2], arguments[1], arguments[3] == "F", arguments[0])
    return array


def scalar(arguments: PickledItems) -> object:
    """``scalar(dtype, data)`` as a number."""
    needs("numpy scalar", len(arguments) == 2 and isinstance(arguments[0], ArrayType))
    dtype, data = arguments
    needs("numpy scalar", isinstance(data, bytes) and len(data) == int(dtype.code[1:]))
    return struct.unpack("<" + _NUMBERS[dtype.code], data)[0]
