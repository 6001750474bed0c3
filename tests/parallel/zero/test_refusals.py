"""What ZeRO refuses, on all ranks alike, and what it makes equal on them; weighted windows, loaders, compile."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lockstep import Accelerator
from lockstep.errors import UsageError
from lockstep.parallel.zero import Sharding
from parallel import zero_problem as problem
from parallel.zero_scenarios import Net, Plain, learn, loss_of, seeded, sgd, values
from tests.patching import module_of
from tests.refusals import expect_refusal


def refusal(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as error:
        call(*args, **options)
    return str(error.value)


def refusals() -> dict[str, str]:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, parallel="zero=3")
    rank = accelerator.process_index
    found = {"shapes": refusal(accelerator.prepare, Net(outputs=3 + rank))}
    found["frozen"] = refusal(accelerator.prepare, Net().requires_grad_(rank == 0))
    model = accelerator.prepare(seeded(Net))
    found["join"] = refusal(lambda: accelerator.join_uneven_inputs([model]).__enter__())
    half = Net()
    half.layers[1].up.half()
    found["types"] = refusal(accelerator.prepare, half)
    found["sparse"] = refusal(accelerator.prepare, nn.Sequential(nn.Embedding(4, 2, sparse=True)))
    found["ddp"] = refusal(accelerator.prepare, DistributedDataParallel(Net()))
    first, second = Net(), Net()
    second.layers[0].up.weight = first.layers[0].up.weight
    accelerator.prepare(first)
    found["shared"] = refusal(accelerator.prepare, second)
    from torch.distributed.fsdp import fully_shard

    by_hand = Net()
    for layer in by_hand.layers:
        fully_shard(layer)
    found["by hand"] = refusal(accelerator.prepare, fully_shard(by_hand))
    # The model prepared first is as it was.
    optimizer = accelerator.prepare(sgd(model))
    accelerator.backward(loss_of(accelerator, model, 0))
    optimizer.step()
    return found


def test_what_cannot_be_sharded_is_refused_on_all_ranks_in_words(run_distributed) -> None:
    words = {
        "shapes": "differs between the ranks",
        "frozen": "differs between the ranks",
        "sparse": "is an Embedding with sparse=True",
        "join": "that is sharded: every rank takes part",
        "types": "trainable parameters of types float16 and float32",
        "ddp": "prepare() wraps the model itself, but got a DistributedDataParallel",
        "shared": "shares 1 parameters",
        "by hand": "sharded already",
    }
    for found in run_distributed(refusals, 2):
        for key, text in words.items():
            assert text in found[key], key
            assert "\n" not in found[key]


def rank_zero_wins(parallel: str) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, parallel=parallel)
    model = seeded(lambda: nn.Sequential(Net(), nn.BatchNorm1d(3)), seed=accelerator.process_index)
    model[1].running_mean.fill_(float(accelerator.process_index + 1))
    return values(model=accelerator.prepare(model))


@pytest.mark.parametrize(("world_size", "parallel"), [(2, "zero=3"), (4, "zero=1 replicate=2")])
def test_all_ranks_take_the_values_of_rank_zero(run_distributed, world_size: int, parallel: str) -> None:
    expected = seeded(lambda: nn.Sequential(Net(), nn.BatchNorm1d(3))).state_dict()
    for found in run_distributed(rank_zero_wins, world_size, parallel):
        for name, value in expected.items():
            expected_value = torch.ones(3) if name == "1.running_mean" else value
            assert torch.equal(found[f"model.{name}"], expected_value)


def kept_state(parallel: str) -> dict[str, float]:
    """How far the tensors of a ``get_state_dict`` move in the next step; the model has a scalar and a buffer."""
    accelerator = Accelerator(cpu=True, parallel=parallel)
    model = seeded(lambda: nn.Sequential(Net(), nn.BatchNorm1d(3)))
    model, optimizer = accelerator.prepare(model, sgd(model))
    state = accelerator.get_state_dict(model)
    before = {name: value.clone() for name, value in state.items()}
    accelerator.backward(loss_of(accelerator, model, 0))
    optimizer.step()
    moved = accelerator.get_state_dict(model)
    assert any(not torch.equal(moved[name], value) for name, value in before.items() if value.ndim == 0)
    return {name: (value - before[name]).abs().max().item() for name, value in state.items()}


@pytest.mark.parametrize("parallel", ["zero=1", "zero=3"])
def test_a_state_that_was_asked_for_stays_as_it_was(run_distributed, parallel: str) -> None:
    for found in run_distributed(kept_state, 2, parallel):
        assert set(found.values()) == {0}


def goes_on_after_an_exception(where: str) -> str:
    """With a torch that cannot forget what an interrupted forward or backward left behind."""
    accelerator = Accelerator(cpu=True, parallel="zero=3")
    model = accelerator.prepare(seeded(Net))

    def fail(*_: Any) -> None:
        raise FloatingPointError

    norm = model.layers[1].norm
    handle = (
        norm.register_forward_pre_hook(fail) if where == "forward" else norm.register_full_backward_hook(fail)
    )
    with pytest.MonkeyPatch.context() as older:
        older.delattr(FSDPModule, "reset_iter_state", raising=False)
        with pytest.raises(FloatingPointError):
            accelerator.backward(loss_of(accelerator, model, 0))
        handle.remove()
        return refusal(loss_of, accelerator, model, 1)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_older_torch_refuses_to_go_on_after_an_exception(run_distributed, where: str) -> None:
    for message in run_distributed(goes_on_after_an_exception, 2, where):
        assert "raised an exception before. Only torch 2.13 or newer can go on after that" in message


# -- windows ---------------------------------------------------------------------------------------------


# -- compile and one-sided use ---------------------------------------------------------------------------


def compiled_before(parallel: str, kind: str) -> tuple[dict[str, torch.Tensor], int]:
    """What is trained, and how many parameters the optimizer has."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    accelerator = Accelerator(cpu=True, parallel=parallel)
    plain = model = seeded(Net, layers=2)
    if kind == "block":
        model.layers[0] = torch.compile(model.layers[0], backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    optimizer = optimizer_of(kind, model)
    if kind == "optimizer first":
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(3):
        learn(accelerator, optimizer, loss_of(accelerator, model, step))
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    state = accelerator.get_state_dict(model)
    assert kind == "block" or state.keys() == plain.state_dict().keys()
    return {f"model.{name.replace('_orig_mod.', '')}": value.clone() for name, value in state.items()}, count


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    # The second steps on whole tensors.
    return torch.optim.Adafactor(model.parameters(), lr=0.1) if kind == "whole steps" else sgd(model)


@pytest.mark.parametrize(
    ("world_size", "parallel", "kind"),
    [
        (1, "zero=3", "model"),
        (2, "zero=3", "block"),
        (2, "zero=2", "whole steps"),
        (2, "zero=3", "optimizer first"),
        (4, "zero=3 replicate=2", "model"),
    ],
)
def test_a_model_compiled_before_prepare_trains_all_its_parameters(
    run_distributed, world_size: int, parallel: str, kind: str
) -> None:
    model = seeded(Net, layers=2)
    optimizer = optimizer_of(kind, model)
    run = Plain()
    for step in range(3):
        learn(run, optimizer, loss_of(run, model, step))
    for actual, count in run_distributed(compiled_before, world_size, parallel, kind):
        assert count == len(list(model.parameters()))
        assert problem.difference(actual, values(model=model)) < 1e-5


def refused_and_mended() -> float:
    accelerator = Accelerator(cpu=True, parallel="zero=3")
    model = problem.make_model()
    model.layers[0].up.half()
    expect_refusal(UsageError, "float16 and float32", accelerator.prepare, model)
    model = accelerator.prepare(model.float())
    return problem.loss_of(model, *problem.make_batches(1)[0]).item()


def test_a_model_that_was_refused_may_be_mended_and_prepared_again(run_distributed) -> None:
    model = problem.make_model()
    model.layers[0].up.half().float()
    expected = problem.loss_of(model, *problem.make_batches(1)[0]).item()
    assert run_distributed(refused_and_mended, 2) == pytest.approx([expected] * 2, rel=2e-6)


# -- settings of optimizers ------------------------------------------------------------------------------


def refused_in_step(parallel: str, setting: str) -> int:
    """The step in which settings that follow this rank's loss are refused; 4: in none."""
    accelerator = Accelerator(cpu=True, parallel=parallel)
    model = seeded(Net)
    options = {"lr": torch.tensor(0.1), "foreach": False} if setting == "tensor lr" else {"lr": 0.1}
    optimizer = torch.optim.Adam(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for step in range(4):
        loss = loss_of(accelerator, model, step)
        accelerator.backward(loss)
        group, mean = optimizer.param_groups[0], accelerator.reduce(loss.detach(), "mean").item()
        if setting == "equal":
            group["lr"] = 0.1 / (1 + mean)
        elif setting == "tensor lr":
            group["lr"].fill_(0.1 / (1 + loss.item()))
        elif setting == "plateau":
            # One rank's losses rise.
            scheduler.step(float(step) if accelerator.process_index else -float(step))
        else:
            group[setting] = (loss.item() % 1, 0.9) if setting == "betas" else loss.item() % 1
        try:
            optimizer.step()
        except UsageError as error:
            return step if "settings of an optimizer, such as lr" in str(error) else -1
        optimizer.zero_grad()
    return 4


def refused_in_steps(parallel: str, settings: list[str]) -> list[int]:
    # A plateau comes in a later step.
    with mock.patch.object(module_of(Sharding), "COMPARED_EVERY", 1):
        return [refused_in_step(parallel, setting) for setting in settings]


@pytest.mark.parametrize(
    ("world_size", "parallel", "settings"),
    [
        (1, "zero=3", {"lr": 4}),
        (2, "zero=1", {"lr": 0, "equal": 4}),
        (2, "zero=3", {"lr": 0, "weight_decay": 0, "betas": 0, "tensor lr": 0, "plateau": 1, "equal": 4}),
        (4, "zero=3 replicate=2", {"lr": 0, "equal": 4}),
    ],
)
def test_settings_that_differ_between_ranks_are_refused_on_all(
    run_distributed, world_size: int, parallel: str, settings: dict[str, int]
) -> None:
    found = run_distributed(refused_in_steps, world_size, parallel, list(settings))
    assert found == [list(settings.values())] * world_size
