"""Mapping over nested containers: types are kept, inputs are not changed."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch

from lockstep import comm
from tests.refusals import expect_refusal

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Batch:
    inputs: torch.Tensor
    name: str = "batch"


@dataclass(frozen=True)
class FrozenBatch:
    inputs: torch.Tensor
    total: int = field(init=False, default=0)


class Encoding(UserDict):
    """Like transformers' BatchEncoding: state beside the items, and ``to`` in place."""

    def __init__(self, data: dict, encodings: str = "") -> None:
        super().__init__(data)
        self.encodings = encodings

    def to(self, device: str) -> Encoding:
        self.data = dict.fromkeys(self.data, "moved in place")
        return self


@pytest.mark.parametrize(
    "container",
    [
        [torch.ones(2), 3],
        (torch.ones(2), "text"),
        Pair(torch.ones(2), None),
        {"a": torch.ones(2), "b": 1.5},
        OrderedDict(a=torch.ones(2)),
        types.MappingProxyType({"a": torch.ones(2)}),
        Encoding({"a": torch.ones(2)}, encodings="kept"),
        Batch(torch.ones(2)),
        FrozenBatch(torch.ones(2)),
        torch.ones(2),
        {"deep": [(Pair(torch.ones(2), [Batch(torch.ones(2))]),)]},
    ],
    ids=lambda container: type(container).__name__,
)
def test_mapping_keeps_types_and_other_leaves_and_leaves_the_input_alone(container):
    doubled = comm.map_tensors(lambda tensor: tensor * 2, container)
    assert type(doubled) is type(container)
    before, after = comm.leaves(container), comm.leaves(doubled)
    assert list(before) == list(after)
    for path, leaf in before.items():
        if isinstance(leaf, torch.Tensor):
            assert leaf.tolist() == [1, 1] and after[path].tolist() == [2, 2]
        else:
            assert after[path] is leaf


def test_a_size_is_a_leaf_that_may_be_replaced():
    given = {"x": torch.ones(2, 3), "size": torch.Size([2, 3])}
    found = comm.map_leaves(lambda path, leaf: None if isinstance(leaf, torch.Size) else path, given)
    assert found == {"x": "['x']", "size": None}


def test_a_mapping_keeps_what_it_holds_besides_its_items():
    assert comm.map_tensors(torch.neg, Encoding({"a": torch.ones(1)}, encodings="kept")).encodings == "kept"
    assert comm.map_tensors(torch.neg, defaultdict(list, a=torch.ones(1))).default_factory is list


def test_transformers_containers_keep_their_types():
    import transformers
    from transformers.modeling_outputs import SequenceClassifierOutput

    output = SequenceClassifierOutput(loss=torch.tensor(1.0), logits=torch.ones(2, 3))
    doubled = comm.map_tensors(lambda tensor: tensor * 2, output)
    assert type(doubled) is SequenceClassifierOutput
    assert doubled.loss == 2 and doubled["logits"].sum() == 12 and output.loss == 1
    batch = transformers.BatchEncoding({"input_ids": torch.ones(2, 3)})
    moved = comm.send_to_device(batch, "meta")
    assert type(moved) is transformers.BatchEncoding
    assert moved["input_ids"].device.type == "meta" and batch["input_ids"].device.type == "cpu"


def test_paths_read_like_code():
    nested = {"a": [Pair(torch.ones(1), 1)], "b": Batch(torch.ones(1))}
    assert list(comm.leaves(nested)) == [
        "['a'][0].first",
        "['a'][0].second",
        "['b'].inputs",
        "['b'].name",
    ]


def test_tensors_are_found_among_other_leaves():
    first, second = torch.ones(1), torch.zeros(2)
    found = comm.tensor_leaves({"a": [Pair(first, 1)], "b": Batch(second), "c": None})
    assert list(found) == ["['a'][0].first", "['b'].inputs"]
    assert found["['a'][0].first"] is first and found["['b'].inputs"] is second


@pytest.mark.parametrize("batch", [[], {"a": "text"}, torch.tensor(1.0)], ids=str)
def test_a_batch_without_rows_has_no_size(batch):
    with pytest.raises(ValueError):
        comm.find_batch_size(batch)


def test_slicing_and_concatenating_are_inverse():
    batch = {"x": torch.arange(10).reshape(5, 2), "tag": "same", "scale": torch.tensor(1.0)}
    parts = [
        comm.map_tensors(lambda tensor, rows=rows: tensor[rows] if tensor.ndim else tensor, batch)
        for rows in (slice(0, 2), slice(2, 5))
    ]
    joined = comm.concatenate(parts)
    assert joined["x"].equal(batch["x"]) and joined["tag"] == "same"
    assert joined["scale"].tolist() == [1.0, 1.0]


def test_concatenating_what_is_no_tensor_or_not_alike_is_refused():
    expect_refusal(TypeError, "tensors", comm.concatenate, [{"tag": "a"}, {"tag": "b"}])
    expect_refusal(ValueError, "structure", comm.concatenate, [{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    expect_refusal(ValueError, "empty", comm.concatenate, [])


def test_sending_to_a_device_skips_keys_at_any_depth_and_uses_the_method_to():
    class Movable:
        def to(self, device: str) -> str:
            return f"on {device}"

    batch = {"x": torch.ones(1), "inner": [{"stay": torch.ones(1)}], "graph": Movable(), "n": 3}
    moved = comm.send_to_device(batch, "meta", skip_keys="stay")
    assert moved["x"].device.type == "meta" and moved["inner"][0]["stay"].device.type == "cpu"
    assert moved["graph"] == "on meta" and moved["n"] == 3
