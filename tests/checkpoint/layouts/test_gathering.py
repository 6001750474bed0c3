"""Norms, whole tensors and weights of all stages, of models that are spread in two ways at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from checkpoint.layouts.spread import LAYOUTS, Layout, Net, part, values
from lockstep import Accelerator
from lockstep.checkpoint.weights import collect_stages
from lockstep.comm import local, shard_like, total_norm, whole
from lockstep.errors import UsageError

CHECKED = [
    *("zero=3 tp=2", "ddp tp=2", "ddp ep=2", "zero=3", "tp=2", "ep=2"),
    *("pp=2", "pp=2 tp=2", "zero=3 pp=2"),
]


def found() -> dict[str, list[str]]:
    """By layout, what is not as it should be."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    wrong = {}
    for layout in LAYOUTS:
        if layout.world == accelerator.num_processes and layout.name in CHECKED:
            check = gathered_differ if layout.pp == 1 else stages_differ
            wrong[layout.name] = check(layout.prepare(accelerator.process_index), accelerator)
    return wrong


def gathered_differ(layout: Layout, accelerator: Accelerator) -> list[str]:
    given = values(3)
    state = layout.build(given).state_dict()
    full = whole(state)
    wrong = [name for name, value in given.items() if not torch.equal(full[name], value)]
    if full["head.weight"].data_ptr() != full["embed.weight"].data_ptr():
        wrong.append("ties")
    for name, like in state.items():
        again = shard_like(given[name], like)
        if type(again) is not type(like.data) or not torch.equal(part(again), part(like)):
            wrong.append(f"shard_like {name}")
    parameters = list(layout.build(given).parameters())
    expected = [given[name] for name, _ in Net().named_parameters()]
    for norm_type in (2.0, 1.0, float("inf")):
        norm = total_norm(parameters, norm_type)
        if not torch.allclose(norm, torch.nn.utils.get_total_norm(expected, norm_type), rtol=2e-6):
            wrong.append(f"norm {norm_type}")
    return wrong


def stages_differ(layout: Layout, accelerator: Accelerator) -> list[str]:
    given = values(3)
    state = layout.build(given).state_dict()
    full = collect_stages(state, accelerator._communicator, layout.whole[0])
    if accelerator.process_index:
        return list(full)
    wrong = [] if list(full) == list(given) else ["names"]
    wrong += [name for name, value in given.items() if not torch.equal(full[name], value)]
    return wrong + (["ties"] if full["head.weight"] is not full["embed.weight"] else [])


@pytest.mark.parametrize("world", [2, 4])
def test_whole_tensors_norms_and_stages_are_those_of_the_whole_model(
    run_distributed: Any, world: int
) -> None:
    expected = {layout.name: [] for layout in LAYOUTS if layout.world == world and layout.name in CHECKED}
    assert len(expected) > 3
    assert run_distributed(found, world) == [expected] * world


def norm_of_addends() -> str:
    Accelerator(cpu=True)
    addend = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
    assert local(addend).sum() == 3
    try:
        total_norm([torch.ones(2), addend])
    except UsageError as error:
        return str(error)
    return ""


def test_a_gradient_that_is_not_summed_up_has_no_norm(run_distributed: Any) -> None:
    for message in run_distributed(norm_of_addends, 2):
        assert "each rank holds a term of a sum" in message
