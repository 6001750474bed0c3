"""The front, as scripts use it; where Accelerate documents a result, it is the oracle."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

import lockstep.state
import lockstep.utils
from lockstep import Accelerator, AutocastKwargs, DataLoaderConfiguration, PartialState
from lockstep.errors import ConfigError, LockstepError, UsageError
from lockstep.observe.hang import ProcessWatch
from lockstep.runtime import end_runtime, split_between
from lockstep.state import AcceleratorState, GradientState
from tests.refusals import expect_refusal
from train import problems

# -- names ----------------------------------------------------------------------------------------------


FOUND_BY_NAME = [
    "utils.set_seed",
    "utils.operations.DistributedOperationException",
    "state.is_initialized",
    "data_loader.skip_first_batches",
    "optimizer.AcceleratedOptimizer",
]
IN_A_FORK_EACH = """
import os, sys, traceback
import torch, torch._dynamo  # what takes the time, and nothing of lockstep

for source in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            assert not [name for name in sys.modules if name.startswith("lockstep")]
            exec(source)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if os.waitpid(child, 0)[1] == 0:
        print(source.splitlines()[-1])
"""


def test_modules_are_found_from_the_package_alone() -> None:
    """Each in a process where nothing else of the package has been imported."""
    sources = []
    for expression in FOUND_BY_NAME:
        module, first = expression.rpartition(".")[0], expression.split(".")[0]
        sources.append(f"import lockstep\nlockstep.{first}\nimport lockstep.{module}\nlockstep.{expression}")
    command = [sys.executable, "-c", IN_A_FORK_EACH, *sources]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.split() == [f"lockstep.{expression}" for expression in FOUND_BY_NAME], result.stderr


def test_facts_that_scripts_read_from_the_accelerator() -> None:
    config = DataLoaderConfiguration(dispatch_batches=False, non_blocking=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config, step_scheduler_with_optimizer=False)
    assert accelerator.dispatch_batches is False and accelerator.non_blocking
    assert not accelerator.use_stateful_dataloader and not accelerator.use_seedable_sampler
    assert not accelerator.step_scheduler_with_optimizer and not accelerator.multi_device
    assert accelerator.deepspeed_plugin is None and accelerator.parallelism_config is None
    assert not accelerator.is_fsdp2 and not accelerator.is_composable_parallelism_enabled
    accelerator.even_batches = False
    assert not accelerator.prepare(DataLoader(torch.arange(4))).even_batches
    assert lockstep.state.is_initialized()


# -- processes ------------------------------------------------------------------------------------------


def order_of_blocks(fails: bool) -> list[Any]:
    accelerator = Accelerator(cpu=True)
    store = torch.distributed.distributed_c10d._get_default_store()
    order = []
    try:
        with accelerator.main_process_first():
            order.append(store.add("turn", 1))
            if fails and accelerator.is_main_process:
                raise ValueError("failed")
    except ValueError as error:
        order.append(str(error))
    return order


@pytest.mark.parametrize("fails", [False, True])
def test_the_main_process_goes_first_also_when_it_fails(run_distributed, fails: bool) -> None:
    first, *others = run_distributed(order_of_blocks, 4, fails)
    assert first == ([1, "failed"] if fails else [1])
    assert sorted(turn for [turn] in others) == [2, 3, 4]


# -- split_between_processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize(
    "inputs",
    [list(range(7)), tuple("abcdef"), {"a": [1, 2, 3, 4, 5], "b": list("vwxyz")}, list(range(8))],
    ids=["list", "tuple", "mapping", "even"],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_inputs_are_split_as_accelerate_documents(world_size: int, inputs: Any, padding: bool) -> None:
    lengths = len(inputs["a"]) if isinstance(inputs, dict) else len(inputs)
    share, extra = divmod(lengths, world_size)
    start = 0
    for rank in range(world_size):
        count = share + (rank < extra)

        def part(values: Any, start: int = start, count: int = count) -> Any:
            own = values[start : start + count]
            missing = share + (extra > 0) - count if padding else 0
            return own + own[-1:] * missing

        expected = {k: part(v) for k, v in inputs.items()} if isinstance(inputs, dict) else part(inputs)
        assert split_between(inputs, rank, world_size, padding) == expected
        start += count


def test_tensors_are_split_along_their_first_dim() -> None:
    rows = torch.arange(10).view(5, 2)
    assert torch.equal(split_between(rows, 1, 2, True), rows[[3, 4, 4]])
    assert split_between([1], 1, 2) == []
    assert split_between([1], 1, 2, True) == [1]
    with pytest.raises(UsageError):
        split_between({"a": [1], "b": [1, 2]}, 0, 2)


# -- gather_for_metrics ---------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return iter(torch.arange(self.count))


class Uneven(BatchSampler):
    """Batches of 1, 2, 3, 1, 2, 3, ... indices."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        start, size = 0, 1
        while start < self.count:
            yield list(range(start, min(start + size, self.count)))
            start, size = start + size, size % 3 + 1

    def __len__(self) -> int:
        return sum(1 for _ in self)


def evaluation_loader(kind: str, count: int) -> DataLoader:
    data: Dataset = TensorDataset(torch.arange(count))
    if kind == "iterable":
        return DataLoader(Stream(count), batch_size=3, collate_fn=lambda rows: [torch.stack(rows)])
    if kind == "dynamic":
        return DataLoader(data, batch_sampler=Uneven(count))
    if kind == "batch sampler":
        return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 3, drop_last=False))
    return DataLoader(data, batch_size=3, drop_last=kind == "drop_last", num_workers=2 * (kind == "workers"))


def evaluate(kind: str, count: int, config: dict[str, Any]) -> list[int]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    loader = accelerator.prepare(evaluation_loader(kind, count))
    return [row for [rows] in loader for row in accelerator.gather_for_metrics(rows).tolist()]


def repeated_losses(split_batches: bool) -> tuple[float, int]:
    config = DataLoaderConfiguration(split_batches=split_batches)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    losses, size = [], 4
    loader = accelerator.prepare(DataLoader(torch.arange(22.0), batch_size=size))
    for rows in loader:
        loss = rows.mean()
        losses.append(
            accelerator.gather_for_metrics(
                loss.repeat(size // accelerator.num_processes if split_batches else size)
            )
        )
    return torch.cat(losses).mean().item(), len(torch.cat(losses))


@pytest.mark.parametrize("split_batches", [False, True])
def test_a_loss_repeated_for_each_sample_counts_the_samples_of_a_short_last_batch(
    run_distributed, split_batches: bool
) -> None:
    assert run_distributed(repeated_losses, 1, split_batches) == [(10.5, 22)]
    for _, count in run_distributed(repeated_losses, 2, split_batches):
        assert count == 22


@pytest.mark.parametrize(
    ("world_size", "kind"),
    [(2, "drop_last"), (2, "batch sampler"), (2, "iterable"), (2, "dynamic"), (2, "workers"), (4, "plain")],
)
def test_every_sample_is_gathered_exactly_once(run_distributed, world_size: int, kind: str) -> None:
    for count in (13, 16) if kind != "workers" else (13,):
        size = count - count % (3 * world_size) if kind == "drop_last" else count
        for found in run_distributed(evaluate, world_size, kind, count, {}):
            assert sorted(found) == list(range(size))


@pytest.mark.parametrize("config", [{"split_batches": True}, {"dispatch_batches": True}], ids=str)
def test_every_sample_is_gathered_once_however_batches_are_dealt(
    run_distributed, config: dict[str, Any]
) -> None:
    ranks = 3 if "split_batches" in config else 2  # 3 divides the batch
    assert run_distributed(evaluate, ranks, "plain", 13, config) == [list(range(13))] * ranks


# -- prepare --------------------------------------------------------------------------------------------


def test_objects_are_prepared_in_any_order_and_others_pass_through() -> None:
    accelerator = Accelerator(cpu=True)
    model = problems.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.zeros(4)))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    other = object()
    found = accelerator.prepare(schedule, loader, other, optimizer, None, model)
    assert found[0].scheduler is schedule
    assert found[1].original is loader
    assert found[2] is other
    assert found[3].optimizer is optimizer
    assert found[4] is None
    assert found[5] is model
    assert accelerator.prepare(other) is other
    assert accelerator.free_memory(*found[:2]) == [None, None]


def prepare_again() -> list[bool]:
    """Of each object whether a second ``prepare``, alone or beside a new one, returns what the first did."""
    found = []
    for parallel in ("ddp", "zero=2"):
        accelerator = Accelerator(cpu=True, parallel=parallel)
        model = problems.make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.zeros(4)))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        first = accelerator.prepare(model, optimizer, loader, schedule)
        found += [a is b for a, b in zip(first, accelerator.prepare(*first), strict=True)]
        found += [accelerator.prepare(one) is one for one in first]
        second = torch.optim.SGD(first[0].parameters(), lr=0.1)
        again = accelerator.prepare(first[0], second)
        found += [again[0] is first[0], again[1].optimizer is second]
        accelerator.free_memory()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_prepare_returned_is_returned_by_a_second_call(run_distributed, world_size: int) -> None:
    assert run_distributed(prepare_again, world_size) == [[True] * 20] * world_size


def test_on_one_process_any_loss_may_run_backward() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        accelerator.prepare(other)  # nobody has called it
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def test_a_pickled_accelerator_has_the_same_arguments_and_nothing_prepared() -> None:
    config = DataLoaderConfiguration(even_batches=False)
    plugins: dict[str, Any] = {
        "dataloader_config": config,
        "kwargs_handlers": [AutocastKwargs(enabled=False)],
    }
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3, verify="off", **plugins
    )
    accelerator.prepare(nn.Linear(2, 1))
    for other in (pickle.loads(pickle.dumps(accelerator)), copy.deepcopy(accelerator)):
        assert (other.mixed_precision, other.gradient_accumulation_steps) == ("bf16", 3)
        assert other._options.parallel == accelerator._options.parallel
        assert not other.even_batches and not other._options.autocast.enabled
        assert other is not accelerator and other._preparation.models.prepared == []


def misuse(kind: str) -> str:
    accelerator = Accelerator(cpu=True)
    model = problems.make_model()
    optimizer = torch.optim.SGD(model.parameters())
    empty = DataLoader(TensorDataset(torch.zeros(2)), batch_size=4, drop_last=True)
    calls: dict[str, Callable[[], object]] = {
        "twice": lambda: (accelerator.prepare(optimizer), accelerator.prepare(model, optimizer)),
        "empty": lambda: accelerator.prepare(empty),
        "no model": lambda: accelerator.backward(model(problems.make_rows(0, 0, 4)[0]).sum()),
        "placement": lambda: accelerator.prepare(model, device_placement=[True, False]),
        "meta": lambda: accelerator.prepare(nn.ParameterList([torch.empty(2, device="meta")])),
        "fsdp": lambda: Accelerator(cpu=True, fsdp_plugin=object()),
        "typo": lambda: Accelerator(cpu=True, mixed_precison="bf16"),
        "precision": lambda: Accelerator(cpu=True, mixed_precision="bf15"),
        "handler": lambda: Accelerator(cpu=True, kwargs_handlers=[object()]),  # type: ignore[list-item]
    }
    with pytest.raises(LockstepError) as caught:
        calls[kind]()
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "world_size", "words"),
    [
        ("twice", 1, ("SGD was passed to prepare twice", "Prepare each object once")),
        ("twice", 2, ("SGD was passed to prepare twice",)),
        ("empty", 1, ("length 0", "Give it data")),
        ("no model", 2, ("no model was prepared", "Pass the model to accelerator.prepare()")),
        ("placement", 1, ("1 objects and 2 values", "one value for each")),
        ("meta", 1, ("ParameterList is on the meta device", "Give them reset_parameters()")),
        ("fsdp", 1, ("fsdp_plugin is of type object", "Pass a FullyShardedDataParallelPlugin")),
        ("typo", 1, ("no option 'mixed_precison'", "Did you mean 'mixed_precision'?")),
        ("precision", 1, ("bf15", "Did you mean 'bf16'?")),
        ("handler", 1, ("an object of type object", "AutocastKwargs")),
    ],
)
def test_wrong_use_says_what_to_do(
    run_distributed, kind: str, world_size: int, words: tuple[str, ...]
) -> None:
    for message in run_distributed(misuse, world_size, kind):
        assert all(word in message for word in words), message


def backward_of_another_model(_: int) -> tuple[list[str], bool]:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(problems.make_model())
    model, plain = problems.make_model(), problems.make_model()
    rows, labels = problems.make_rows(0, accelerator.process_index, 4)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        accelerator.backward(F.cross_entropy(model(rows), labels))
    F.cross_entropy(plain(rows), labels).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [str(one.message) for one in seen], all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_backward_of_a_model_that_was_not_prepared_gives_the_ranks_own_gradients(run_distributed) -> None:
    for messages, equal in run_distributed(backward_of_another_model, 2, 0):
        assert equal
        assert any("not averaged over the 2 ranks" in message for message in messages)


# -- what scripts import and read -----------------------------------------------------------------------


def test_state_objects_show_the_latest_accelerator() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    assert AcceleratorState().mixed_precision == "bf16"
    assert AcceleratorState().num_processes == PartialState().num_processes == 1
    state = GradientState()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.zeros(5)), batch_size=2))
    assert (state.num_steps, state.in_dataloader, state.active_dataloader) == (2, False, None)
    assert (state.end_of_dataloader, state.remainder, state.sync_gradients) == (False, -1, True)
    ends = []
    for _ in loader:
        assert state.in_dataloader
        assert state.active_dataloader is loader
        assert state.remainder == 1
        ends.append(state.end_of_dataloader)
    assert ends == [False, False, True]
    assert not state.in_dataloader


def test_environment_helpers_restore_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    with lockstep.utils.patch_environment(kept=2, added="x"):
        assert (os.environ["KEPT"], os.environ["ADDED"]) == ("2", "x")
        os.environ["OTHER_OF_THE_BLOCK"] = "stays"
    assert os.environ["KEPT"] == "1"
    assert "ADDED" not in os.environ
    assert os.environ.pop("OTHER_OF_THE_BLOCK") == "stays"
    with lockstep.utils.clear_environment():
        assert not os.environ
    assert os.environ["KEPT"] == "1"
    assert lockstep.utils.str_to_bool("Yes") == 1
    assert lockstep.utils.str_to_bool("off", to_bool=True) is False
    with pytest.raises(ValueError):
        lockstep.utils.str_to_bool("maybe")


def test_a_precision_in_code_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert Accelerator(cpu=True).mixed_precision == "bf16"
    assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf17")
    expect_refusal(ConfigError, "ACCELERATE_MIXED_PRECISION", Accelerator, cpu=True)


# -- what the constructor does to the process ----------------------------------------------------------------


def unwatched_and_again(_: int) -> bool:
    Accelerator(cpu=True, watch=False)
    end_runtime()
    before = ProcessWatch._current
    Accelerator(cpu=True)
    return before is None


def test_a_run_after_one_that_was_not_watched_begins_as_the_first_one(run_distributed) -> None:
    assert run_distributed(unwatched_and_again, 1, 0) == [True]


def test_what_is_prepared_keeps_the_state_of_an_accelerator_that_a_script_let_go_of() -> None:
    def prepared() -> Any:
        accelerator = Accelerator(
            cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3, watch=False
        )
        model = torch.nn.Linear(2, 1)
        return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    kept = prepared()
    gc.collect()
    assert AcceleratorState().mixed_precision == "bf16"
    assert GradientState().num_steps == 3
    del kept
