"""A prepared, sharded model takes the state dict of the plain one."""

from __future__ import annotations

from typing import Any

import torch

from lockstep import Accelerator, DistributedType
from parallel import zero_problem as problem


def load_whole(parallel: str) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, parallel=parallel)
    model = accelerator.prepare(problem.make_model())
    given = {name: tensor + 1 for name, tensor in problem.make_model().state_dict().items()}
    keys = model.load_state_dict(given)
    whole = {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
        for name, tensor in model.state_dict().items()
    }
    message = ""
    try:
        model.load_state_dict({**given, "embed.weight": torch.ones(3, 3)})
    except RuntimeError as error:
        message = str(error)
    return {
        "missing": [*keys.missing_keys, *keys.unexpected_keys],
        "equal": all(torch.equal(whole[name], tensor) for name, tensor in given.items()),
        "tied": model.head.weight is model.embed.weight,
        "message": message,
        "type": accelerator.distributed_type,
        "is_fsdp2": accelerator.is_fsdp2,
    }


def test_load_state_dict_takes_whole_tensors(run_distributed) -> None:
    for parallel in ("zero=1", "zero=3"):
        for found in run_distributed(load_whole, 2, parallel):
            assert found["missing"] == []
            assert found["equal"]
            assert found["tied"]
            assert "size mismatch for embed.weight" in found["message"]
            assert found["type"] == DistributedType.FSDP
            assert found["is_fsdp2"]
