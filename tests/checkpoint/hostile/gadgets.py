"""Code in all the ways in which checkpoints of others carry it."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint.draft import MODEL, STATE, Draft
from checkpoint.hostile.case import Case, setting


class Gadget:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def gadgets(outside: Path) -> Iterator[Case]:
    """Code in all the ways in which checkpoints of others carry it; none may run, listed or not."""
    marker = outside / "fired"
    gadget = pickle.dumps(Gadget(marker))
    code = f"open({str(marker)!r}, 'w')".encode()
    files = {
        "optimizer.bin": gadget,
        ".metadata": gadget,
        "pytorch_model.bin": gadget,
        "sitecustomize.py": code,
        "torch.py": code,
        "config.yaml": b"!!python/object/apply:os.system ['touch fired']",
    }
    for name, content in files.items():

        def dropped(draft: Draft, name: str = name, content: bytes = content) -> None:
            draft.then = lambda directory: (directory / name).write_bytes(content)

        yield Case(f"{name} beside the files", dropped, "harmless")
        yield Case(
            f"{name} among the files", lambda draft, n=name, c=content: draft.raw.update({n: c}), "harmless"
        )
    for name in ("tensors.json", "state.json", "rank-00000.json", MODEL, STATE):
        yield Case(f"gadget as {name}", lambda draft, n=name: draft.raw.update({n: gadget}))
    yield Case("gadget as manifest", lambda draft: setattr(draft, "manifest", gadget))
    packed = {"$": "bytes", "value": base64.b64encode(gadget).decode()}
    for kind in ("pickle", "exec", "py/object"):
        word = {"$": kind, "value": packed["value"], "items": ["os.system", "true"], "name": "os.system"}
        yield Case(f"word {kind}", setting(lambda draft: draft.own["object.0"], "losses", word))
    yield Case("gadget as bytes in a group", setting(lambda draft: draft.group, "eps", packed))
    yield Case(
        "py/reduce", setting(lambda draft: draft.own, "rng", {"py/reduce": [{"py/function": "os.system"}]})
    )
