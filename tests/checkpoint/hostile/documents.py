"""Hostile documents: none at all, of another kind, or with words of the codec that mean nothing."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from checkpoint.draft import Draft, as_json, nested
from checkpoint.hostile.case import Case, setting, several


def documents() -> Iterator[Case]:
    """Whole documents that are none, or of another kind."""
    contents = {
        "an empty file": b"",
        "a list": b"[]",
        "a pickle": pickle.dumps({"rng": 1}),
        "deep": nested(100_000),
        "NaN": b'{"contents": NaN, "rng": NaN, "x": NaN}',
        "a duplicate key": b'{"contents": {}, "contents": {}}',
        "not UTF-8": b'{"contents": "\xff"}',
    }
    for name in ("tensors.json", "state.json", "rank-00000.json"):
        for what, content in contents.items():
            yield Case(f"{name} is {what}", lambda draft, n=name, c=content: draft.raw.update({n: c}))
    yield Case("rank file is missing", lambda draft: draft.body["saved"].update(ranks=[3], world_size=4))
    for key in ("contents", "models", "optimizer.0", "scheduler.0", "scaler.0"):
        yield Case(f"state without {key}", lambda draft, k=key: draft.common.pop(k))
        yield from several(f"state {key}", lambda draft: draft.common, key, [None, "x", [1], {"a": [1]}])
    yield from several("imported", lambda draft: draft.common, "imported", [None, "x"], "harmless")
    for kind, count in (("model", 0), ("model", 10**30), ("load", 1), ("__class__", 1)):
        yield Case(
            f"contents of {count} {kind}",
            lambda draft, k=kind, c=count: draft.common["contents"].update({k: c}),
        )

        def imported(draft: Draft, kind: str = kind, count: int = count) -> None:
            draft.common["imported"] = "x"
            draft.common["contents"] |= {kind: count}

        yield Case(f"imported contents of {count} {kind}", imported)
    for key in ("rng", "loader.0", "object.0"):
        yield Case(f"rank without {key}", lambda draft, k=key: draft.own.pop(k))
        fate = "refused late" if key == "object.0" else "refused"
        yield from several(f"rank {key}", lambda draft: draft.own, key, [None, "x", [1], {}], fate)
    words: list[Any] = [None, 1, "x", [1], {}, {"window": 1}, {"window": {}, "layouts": 1, "models": 2}]
    yield from several("window", lambda draft: draft.own, "window.0", words)
    yield from several(
        "rank buffers", lambda draft: draft.own, "buffers", [None, 1, "x", [1], {"model.0.1.bias": "x"}]
    )


def values() -> Iterator[Case]:
    """What state.json and rank files say in the codec's words."""
    words: list[Any] = [
        {"$": "load"},
        {"$": None},
        {"$": "tensor"},
        {"$": "tensor", "name": "absent"},
        {"$": "tensor", "name": "../outside/secret.bin"},
        {"$": "float", "value": int("9" * 400)},
        {"$": "bytes", "value": "*"},
        {"$": "complex", "items": [10**400, 0]},
        {"$": "set", "items": [{}]},
        {"$": "dict", "items": "ab"},
        {"$": "deque", "items": [1], "longest": 10**30},
        *({"$": "dtype", "value": name} for name in ("load", "__class__", "_inductor", "utils.data", None)),
        *({"$": "device", "value": name} for name in ("load", "cpu:-5", 10**30)),
    ]
    for word in words:
        yield Case(f"value {str(word)[:100]}", setting(lambda draft: draft.own["object.0"], "losses", word))
    for depth in (150, 950):
        text = nested(depth)
        yield Case(
            f"lists {depth} deep",
            lambda draft, t=text: draft.raw.update(
                {"rank-00000.json": as_json(draft.own).replace(b'"losses": [', b'"losses": [' + t + b", ")}
            ),
        )
