"""States as JSON and tensors: what goes in comes out, and nothing else goes in."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import datetime
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.checkpoint.format import canonical, decode, encode, parse_json, tensor_names
from lockstep.errors import CheckpointError, UsageError
from tests.marks import examples


def survivor(value: Any) -> Any:
    """``value`` after a way through JSON."""
    tensors: dict[str, torch.Tensor] = {}
    document = encode(value, tensors, "state")
    read = parse_json(canonical(document), "state.json")
    assert sorted(tensor_names(read)) == sorted(tensors)
    return decode(read, tensors)


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, in every element; NaN is NaN, and -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (list, tuple, deque)):
        alike = len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
        return alike and (not isinstance(a, deque) or a.maxlen == b.maxlen)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b)


texts = st.text(max_size=5) | st.sampled_from(["$", "a.b", "a", "tensor", "items", "state", "__class__"])
hashables = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts | st.binary(max_size=4),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2),
    max_leaves=3,
)
leaves = (
    hashables
    | st.floats()
    | st.complex_numbers()
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda:1")])
    | st.builds(torch.tensor, st.lists(st.floats(width=32, allow_nan=False), max_size=3))
    | st.builds(lambda x: torch.tensor(x), st.booleans())
    | st.builds(lambda x: np.array(x, dtype=np.int16), st.lists(st.integers(-9, 9), max_size=3))
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(deque, st.lists(inner, max_size=3), st.sampled_from([None, 3]))
        | st.dictionaries(texts, inner, max_size=3)
        | st.dictionaries(hashables, inner, max_size=3)
        | st.dictionaries(texts, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(hashables, st.integers(), max_size=3).map(Counter)
        | st.sets(hashables, max_size=3)
    ),
    max_leaves=12,
)


@examples(300)
@given(values)
def test_any_nested_state_survives(value: Any) -> None:
    assert same(survivor(value), value)


def test_dictionaries_keep_their_order() -> None:
    ordered = OrderedDict([("z", 1), ("a", 2)])
    assert list(survivor(ordered)) == ["z", "a"]
    assert list(survivor({2: "z", 1: "a"})) == [2, 1]
    assert list(survivor({"z": {"c": 0, "b": 1}, "a": 2})["z"]) == ["c", "b"]
    assert list(survivor({"z": 1, "a": 2})) == ["z", "a"]


@pytest.mark.parametrize(
    "value",
    [
        2**70,
        5e-324,
        1.7976931348623157e308,
        -0.0,
        float("nan"),
        complex(float("-inf"), -0.0),
        b"\0\xff",
        {(): 1},
        {"$": "tensor", "name": "model.0.weight"},
        deque([1, 2], maxlen=2),
        torch.float8_e4m3fn,
        torch.zeros(2, 0, 3),
        torch.tensor(3, dtype=torch.int8),
        np.array(2.5),
        np.array([2**63], dtype=np.uint64),
    ],
)
def test_a_value_survives_with_its_type(value: Any) -> None:
    assert same(survivor(value), value)


def test_numbers_of_numpy_become_numbers_of_python() -> None:
    found = survivor([np.float64(0.1), np.float32(0.5), np.int64(3), np.bool_(True), np.complex64(1j)])
    assert same(found, [0.1, 0.5, 3, True, 1j])


def test_other_dictionaries_become_plain_ones_and_named_tuples_tuples() -> None:
    found = survivor([defaultdict(list, {"a": [1]}), pytest.param(1)])
    assert same(found[0], {"a": [1]})
    assert type(found[1]) is tuple


def test_tensors_are_not_copied_and_have_names_of_their_own() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    tensors: dict[str, torch.Tensor] = {}
    encode({"x": {"y": a}, "x.y": b, "again": a}, tensors, "object.0")
    assert len(tensors) == 3
    assert all(name.startswith("object.0.") for name in tensors)
    assert {t.data_ptr() for t in tensors.values()} == {a.data_ptr(), b.data_ptr()}


def test_arrays_are_copied_as_their_owner_may_go_on_with_them() -> None:
    array = np.arange(3)
    tensors: dict[str, torch.Tensor] = {}
    encode([array], tensors, "s")
    array[:] = 9
    assert tensors["s.0"].tolist() == [0, 1, 2]


def test_gradients_are_no_part_of_a_state() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    found = survivor({"w": weight, "y": weight * 2})
    assert not found["w"].requires_grad
    assert not found["y"].requires_grad


class Shade(enum.Enum):
    DARK = 1


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (object(), "state"),
        ([1, object()], r"state\.1"),
        ({"a": {"b": (0, {"c": object()})}}, r"state\.a\.b\.1\.c"),
        ({object(): 1}, r"state\.key"),
        ({3: print}, r"state\.3"),
        (Shade.DARK, "state"),
        (datetime(2020, 1, 1), "state"),
        ([np.datetime64("2020-01-01")], r"state\.0"),
        (torch.Generator(), "state"),
        ([np.array(["text"])], r"state\.0"),
        ([np.zeros(2, dtype=">f4")], r"state\.0"),
        ([np.longdouble(1)], r"state\.0"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(UsageError, match=rf"^{path} is .*state_dict\(\)"):
        encode(value, {}, "state")


STRANGE = [
    {"$": "tensor"},
    {"$": "tensor", "name": "none"},
    {"$": "array", "name": None},
    {"$": "module", "value": "os.system"},
    {"$": None},
    {"$": "float"},
    {"$": "float", "value": "1; import os"},
    {"$": "float", "value": 10**400},
    {"$": "bytes", "value": "not base64!"},
    {"$": "complex", "items": [1, 2, 3]},
    {"$": "dtype", "value": "load"},
    {"$": "dtype", "value": "_dynamo"},
    {"$": "device", "value": "a toaster"},
    {"$": "deque", "items": [1], "longest": -1},
    {"$": "deque", "items": [1], "longest": 2**70},
    {"$": "dict", "items": [[[1], 2]]},
    {"$": "dict", "items": 3},
    {"$": "counter", "items": [[{}, 1]]},
    {"$": "set", "items": [[1]]},
    {"$": "tuple"},
    {"$": "list", "items": []},
]


@pytest.mark.parametrize("document", STRANGE, ids=lambda document: str(document)[:40])
def test_documents_that_nobody_wrote_are_errors_of_the_checkpoint(document: Any) -> None:
    with pytest.raises(CheckpointError):
        decode({"a": [document]}, {"a": torch.ones(1)})
