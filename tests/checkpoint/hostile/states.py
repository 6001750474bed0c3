"""Hostile states of optimizers, schedulers, loss scales, loaders, models and generators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from checkpoint.draft import Draft
from checkpoint.hostile.case import Case, setting, several


def optimizers() -> Iterator[Case]:
    def group(key: str, *values: Any) -> Iterator[Case]:
        return several(f"group {key}", lambda draft: draft.group, key, values)

    yield from group("params", None, ["0.0.weight"], [0, 1, 2, 3, 4, 5], ["x"] * 6, [[]] * 6)
    yield from group("params", ["0.0.weight"] * 6, [None] * 6)
    yield from group("lr", "x", None, {"$": "device", "value": "cpu"})
    yield from group("betas", "xy", 0.9, {"$": "tuple", "items": [0.9]}, {"$": "tuple", "items": ["a", "b"]})
    yield from group("eps", "os.system")
    yield from several("group", lambda draft: draft.group, "__class__", ["os.system"], "harmless")
    yield from several(
        "optimizer groups", lambda draft: draft.optimizer, "param_groups", [None, [], "x", [1]]
    )
    yield from several(
        "optimizer groups", lambda draft: draft.optimizer, "param_groups", [[{}], [{"params": []}] * 2]
    )
    yield from several(
        "optimizer state", lambda draft: draft.optimizer, "state", [None, {"x": {}}, {"0": {}}]
    )
    of_weight = "state of a weight"
    yield from several(of_weight, lambda draft: draft.optimizer["state"], "0.0.weight", [None, "x"])
    yield from several(
        "exp_avg",
        lambda draft: draft.optimizer["state"]["0.0.weight"],
        "exp_avg",
        [None, "x"],
    )
    yield from several("by_name", lambda draft: draft.common["optimizer.0"], "by_name", [None, "x", False])


def states() -> Iterator[Case]:
    """Schedulers, the loss scale, loaders and weights."""

    def scheduler(key: str, *values: Any, fate: str = "refused") -> Iterator[Case]:
        return several(f"scheduler {key}", lambda draft: draft.common["scheduler.0"], key, values, fate)

    for key in (
        "step",
        "optimizer",
        "load_state_dict",
        "__class__",
        "__reduce__",
    ):
        yield from scheduler(key, "os.system")
    yield from scheduler("last_epoch", "x", None)
    yield from scheduler("base_lrs", None, ["x"], [0.1, 0.1])
    yield from scheduler("T_max", "100", None)
    yield from scheduler("unknown", "os.system", fate="harmless")
    for value in ("x", None):
        yield Case(f"loss scale {value!r}", setting(lambda draft: draft.common["scaler.0"], "scale", value))
    yield Case("loss scale without scale", lambda draft: draft.common["scaler.0"].pop("scale"))

    def loader(key: str, *values: Any) -> Iterator[Case]:
        return several(f"loader {key}", lambda draft: draft.own["loader.0"], key, values)

    yield from loader("samples", [-1], ["8"], [], None, [8, 8])
    yield from loader("epoch", "0", None)
    yield from loader("rounds", [-1], None)
    yield from loader("turn", 1, -1)
    yield from loader("seed", "x", None)
    yield from loader("dataset_size", 49, "48")
    yield from loader("world_size", 0, "x")
    yield from loader("num_workers", -1, "x")
    yield from loader("kind", "stream", "load")
    yield from loader("__class__", "os.system")

    def model(key: str, *values: Any) -> Iterator[Case]:
        return several(f"model {key}", lambda draft: draft.common["models"]["0"], key, values)

    yield from model("extra", None, "x", {"0.weight": 5}, {"__class__": "x"})
    yield from model("ties", None, {"a": 1})
    for value in (None, "x"):
        yield Case(f"model is {value!r}", setting(lambda draft: draft.common["models"], "0", value))
    yield Case("model is absent", lambda draft: draft.common["models"].pop("0"))
    yield Case(
        "extra tensor in place of a weight",
        setting(
            lambda draft: draft.common["models"]["0"],
            "extra",
            {"0.weight": {"$": "tensor", "name": "model.0.0.bias"}},
        ),
    )
    for name, tensor in (("shape", "model.0.0.weight"), ("absent", "absent")):
        yield Case(
            f"buffer of another {name}",
            setting(
                lambda draft: draft.own,
                "buffers",
                {"model.0.1.running_mean": {"$": "tensor", "name": tensor}},
            ),
        )


def generators() -> Iterator[Case]:
    """States of random number generators."""
    words = {"torch": 5056, "python.words": 625, "numpy.words": 624}
    for key, size in words.items():
        name = f"rank.0.rng.{key}"
        for count in (0, size - 1, size + 1, 100_000):
            kind = torch.uint8 if key == "torch" else torch.int64

            def change(draft: Draft, name: str = name, count: int = count, kind: torch.dtype = kind) -> None:
                draft.replace_tensor(name, torch.zeros(count, dtype=kind))

            yield Case(f"{key} of {count} words", change)
        for value in (None, "x", [1, 2]):
            yield Case(f"{key} is {value!r}", setting(lambda draft: draft.own["rng"], key, value))

    def large(draft: Draft) -> None:
        draft.replace_tensor("rank.0.rng.torch", torch.full((5056,), 255, dtype=torch.uint8))

    def negative(draft: Draft) -> None:
        draft.replace_tensor("rank.0.rng.python.words", torch.full((625,), -1))

    def index(draft: Draft) -> None:
        draft.replace_tensor("rank.0.rng.python.words", torch.full((625,), 2**31))

    yield Case("torch of 255s", large)
    yield Case("negative words", negative)
    yield Case("an index beyond the words", index)
    positions: tuple[Any, ...] = (-1, 625, 10**30, "0", None)
    yield from several("numpy.position", lambda draft: draft.own["rng"], "numpy.position", positions)
    for key, bad in {
        "numpy.generator": ["PCG64", None],
        "numpy.has_gauss": ["x", 10**30],
        "numpy.gauss": ["x", None],
        "python.version": [99, "x"],
        "python.gauss": ["x", [1]],
    }.items():
        yield from several(key, lambda draft: draft.own["rng"], key, bad)
    yield from several("rng", lambda draft: draft.own["rng"], "cuda.0", ["x"], "harmless")
