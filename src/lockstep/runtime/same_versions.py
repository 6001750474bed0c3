"""Whether all ranks run the same torch and the same lockstep: others compute other numbers, or do not fit together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import UsageError
from lockstep.runtime.process import Runtime

BYTES = 128
NAMES = ("torch", "lockstep")
MOST_RANKS = 8


def check_same_versions(runtime: Runtime) -> None:
    """Compare the versions of all ranks; collective, one message of 128 bytes.

    Raises:
        UsageError: on every rank, if they differ.
    """
    if runtime.world_size == 1:
        return
    # without the build (+cpu, +cu126): machines of several kinds may train together
    mine = "\n".join((str(torch.__version__).partition("+")[0], lockstep.__version__)).encode()[:BYTES]
    sent = torch.zeros(BYTES, dtype=torch.uint8)
    sent[: len(mine)] = torch.tensor(list(mine), dtype=torch.uint8)
    sent = sent.to(runtime.control_device)
    received = [torch.empty_like(sent) for _ in range(runtime.world_size)]
    dist.all_gather(received, sent)
    texts = torch.stack(received).cpu().tolist()
    found = differences([bytes(text).rstrip(b"\0").decode(errors="replace").split("\n") for text in texts])
    if found:
        raise UsageError(found)


def differences(of_ranks: Sequence[Sequence[str]]) -> str:
    """What to say of ranks with other versions than the others; empty where all are equal."""
    for name, versions in zip(NAMES, zip(*of_ranks, strict=False), strict=False):
        ranks: dict[str, list[int]] = {}
        for rank, version in enumerate(versions):
            ranks.setdefault(version, []).append(rank)
        if len(ranks) > 1:
            rows = ", ".join(f"{version} on {_ranks(those)}" for version, those in ranks.items())
            return (
                f"The ranks run different versions of {name}: {rows}. Install the same version of {name} in the "
                "environment of each of them."
            )
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_RANKS]))
    more = f" and {len(ranks) - MOST_RANKS} more" if len(ranks) > MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
