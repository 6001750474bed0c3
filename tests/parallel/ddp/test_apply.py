"""Replicas: DDP with its options and hooks, what shows through a prepared model, and uneven inputs."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, DistributedDataParallelKwargs
from lockstep.errors import ConfigError, UsageError
from lockstep.parallel.ddp import gradient_hook
from lockstep.runtime import start_runtime
from lockstep.utils import extract_model_from_parallel, is_compiled_module
from train import problems

POWER_SGD = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3, "orthogonalization_epsilon": 1e-8}


class Branches(nn.Module):
    """A model of which a forward uses only one of two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = problems.make_model(1), problems.make_model(2)
        self.hidden_size = 8

    def forward(self, rows: torch.Tensor, second: bool = False) -> torch.Tensor:
        return (self.second if second else self.first)(rows)

    def greet(self) -> str:
        return "hello"


def train(model: nn.Module, backward: Any, rank: int, steps: int = 6, lr: float = 0.1) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for i in range(steps):
        rows, labels = problems.make_rows(rank, i, 8)
        backward(F.cross_entropy(model(rows), labels))
        optimizer.step()
        optimizer.zero_grad()


# -- options and hooks ----------------------------------------------------------------------------------


def hooked(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    plain = problems.make_model()
    train(accelerator.prepare(plain), accelerator.backward, accelerator.process_index)
    return problems.parameters(plain)


def by_hand(hook: str, wrapper: str) -> dict[str, torch.Tensor]:
    """torch's DDP with torch's own hooks."""
    torch.manual_seed(5)
    start_runtime(cpu=True)
    plain = problems.make_model()
    model = DistributedDataParallel(plain)
    state: Any = None
    if hook == "fp16":
        function: Any = default_hooks.fp16_compress_hook
    elif hook == "no":
        function = default_hooks.allreduce_hook
    else:
        state = powerSGD_hook.PowerSGDState(None, **POWER_SGD)
        function = powerSGD_hook.powerSGD_hook
    if wrapper == "fp16":
        function = default_hooks.fp16_compress_wrapper(function)
    model.register_comm_hook(state, function)
    train(model, torch.Tensor.backward, dist.get_rank())
    return problems.parameters(plain)


@pytest.mark.parametrize(
    ("hook", "wrapper"),
    [
        ("no", "no"),
        ("fp16", "no"),
        ("no", "fp16"),
        ("power_sgd", "no"),
        ("power_sgd", "fp16"),
    ],
)
@pytest.mark.parametrize("world_size", [2])
def test_hooks_train_as_those_of_torch(run_distributed, world_size: int, hook: str, wrapper: str) -> None:
    options = {"comm_hook": hook, "comm_wrapper": wrapper}
    if "power" in hook:
        options["comm_state_option"] = POWER_SGD  # type: ignore[assignment]
    expected = run_distributed(by_hand, world_size, hook, wrapper)[0]
    for actual in run_distributed(hooked, world_size, options):
        assert problems.difference(actual, expected) < (1e-6 if wrapper == "no" else 1e-3)


@pytest.mark.parametrize("options", [{"comm_hook": "bf16"}, {"comm_wrapper": "bf16"}], ids=str)
def test_the_bf16_hook_averages_rounded_gradients(run_distributed, options: dict[str, str]) -> None:
    model = problems.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(6):
        halves = []
        for rank in range(2):
            rows, labels = problems.make_rows(rank, i, 8)
            loss = F.cross_entropy(model(rows), labels)
            halves.append([g.bfloat16() / 2 for g in torch.autograd.grad(loss, list(model.parameters()))])
        for parameter, one, other in zip(model.parameters(), *halves, strict=True):
            parameter.grad = (one + other).float()
        optimizer.step()
    for actual in run_distributed(hooked, 2, options):
        assert problems.difference(actual, problems.parameters(model)) < 1e-6


def test_a_wrapper_that_is_no_precision_is_refused(run_distributed) -> None:
    for message in run_distributed(refused_wrapper, 2):
        assert "comm_wrapper is 'power_sgd'" in message


def refused_wrapper() -> str:
    try:
        hooked({"comm_hook": "fp16", "comm_wrapper": "power_sgd"})
    except ConfigError as error:
        return str(error)
    return ""


def option_values() -> dict[str, Any]:
    options = DistributedDataParallelKwargs(
        bucket_cap_mb=7, find_unused_parameters=True, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    model = accelerator.prepare(Branches())
    return {
        "type": isinstance(model, DistributedDataParallel),
        "bucket": model.bucket_bytes_cap,
        "unused": model.find_unused_parameters,
        "view": model.gradient_as_bucket_view,
        "buffers": model.broadcast_buffers,
        "attribute": model.hidden_size,
        "method": model.greet(),
        "missing": hasattr(model, "nonexistent"),
        "type of the inner": type(accelerator.unwrap_model(model)).__name__,
    }


def test_options_reach_ddp_and_attributes_of_the_model_show_through(run_distributed) -> None:
    assert run_distributed(option_values, 2)[1] == {
        "type": True,
        "bucket": 7 * 1024 * 1024,
        "unused": True,
        "view": True,
        "buffers": False,
        "attribute": 8,
        "method": "hello",
        "missing": False,
        "type of the inner": "Branches",
    }


def what_becomes_of_models() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    frozen, half, evaluated = problems.make_model(), problems.make_model(), problems.make_model()
    frozen.requires_grad_(False)
    half[0].requires_grad_(False)
    prepared = accelerator.prepare(frozen, half)
    judge = accelerator.prepare_model(evaluated, evaluation_mode=True)
    train(prepared[1], accelerator.backward, accelerator.process_index, steps=2)
    return {
        "frozen is itself": prepared[0] is frozen,
        "half frozen is replicated": isinstance(prepared[1], DistributedDataParallel),
        "judge is itself": judge is evaluated,
        "unwrapped": [
            accelerator.unwrap_model(m) is p for m, p in zip(prepared, (frozen, half), strict=True)
        ],
        "extracted": extract_model_from_parallel(prepared[1]) is half,
        "parameters": problems.parameters(half),
    }


def test_frozen_models_are_not_replicated_and_unwrapping_gives_the_users_object(run_distributed) -> None:
    results = run_distributed(what_becomes_of_models, 2)
    trained = [result.pop("parameters") for result in results]
    assert problems.difference(*trained) == 0
    for result in results:
        assert result == {
            "frozen is itself": True,
            "half frozen is replicated": True,
            "judge is itself": True,
            "unwrapped": [True, True],
            "extracted": True,
        }


def gradient_in_no_sync_after_a_frozen_forward() -> tuple[float, float]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    rows = torch.full((1, 1), 1.0 + accelerator.process_index)
    model.requires_grad_(False)
    accelerator.backward(model(rows.clone().requires_grad_()).sum())
    model.requires_grad_(True)
    with accelerator.no_sync(model):
        accelerator.backward(model(rows).sum())
    own = model.module.weight.grad.item()
    accelerator.backward(model(rows).sum())
    return own, model.module.weight.grad.item()


def test_a_forward_of_a_frozen_replica_does_not_end_no_sync(run_distributed) -> None:
    """A GAN's discriminator is frozen for the generator's loss."""
    results = run_distributed(gradient_in_no_sync_after_a_frozen_forward, 2)
    assert results == [(1.0, 3.0), (2.0, 3.0)]


def refuse_replica() -> str:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError) as error:
        accelerator.prepare(DistributedDataParallel(problems.make_model()))
    return str(error.value)


def test_a_model_that_is_replicated_already_is_refused(run_distributed) -> None:
    assert "Pass the plain model" in run_distributed(refuse_replica, 2)[0]


def refuse_data_parallel() -> str:
    with pytest.raises((ConfigError, UsageError)) as error:
        Accelerator(cpu=True, parallel="dataparallel").prepare(problems.make_model())
    return str(error.value)


def test_data_parallel_needs_one_process_and_several_gpus(run_distributed) -> None:
    assert "needs at least 2 GPUs, but this process sees 0" in run_distributed(refuse_data_parallel, 1)[0]
    assert "is for one process, but 2 were started" in run_distributed(refuse_data_parallel, 2)[1]


# -- autocast -------------------------------------------------------------------------------------------


@pytest.fixture
def autocast_model() -> tuple[Accelerator, nn.Module, nn.Module]:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    plain = Branches()
    return accelerator, plain, accelerator.prepare(plain)


def test_a_model_under_autocast_is_the_users_object_and_returns_fp32(autocast_model) -> None:
    accelerator, plain, model = autocast_model
    rows, _ = problems.make_rows(0, 0, 4)
    reference = Branches()
    with torch.autocast("cpu", torch.bfloat16):
        expected = reference(rows)
    assert model is plain
    assert isinstance(model, Branches)
    assert type(model).__name__ == "Branches"
    assert list(model.state_dict()) == list(reference.state_dict())
    assert model(rows).dtype == torch.float32
    assert torch.equal(model(rows), expected.float())
    assert accelerator.unwrap_model(model) is plain


def test_a_deep_copy_runs_under_autocast_with_parameters_of_its_own(autocast_model) -> None:
    _, _, model = autocast_model
    rows, _ = problems.make_rows(0, 0, 4)
    copied = copy.deepcopy(model)
    assert type(copied) is type(model)
    assert torch.equal(copied(rows), model(rows))
    assert copied.first[0].weight is not model.first[0].weight
    assert copy.copy(model).first is model.first
    nested = copy.deepcopy({"one": model, "two": model})
    assert nested["one"] is nested["two"]


@pytest.mark.parametrize("called_before", [False, True])
def test_a_pickled_model_is_of_the_users_class_and_in_fp32(autocast_model, called_before: bool) -> None:
    _, _, model = autocast_model
    rows, _ = problems.make_rows(0, 0, 4)
    if called_before:
        model(rows)
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        loaded = pickle.loads(pickle.dumps(model, protocol))
        assert type(loaded) is Branches
        assert loaded(rows).dtype == torch.float32
        assert torch.equal(loaded(rows), Branches()(rows))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is Branches


def test_autocast_can_be_removed_while_unwrapping(autocast_model) -> None:
    accelerator, plain, model = autocast_model
    rows, _ = problems.make_rows(0, 0, 4)
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is plain
    assert type(plain) is Branches
    assert torch.equal(plain(rows), Branches()(rows))


def test_a_compiled_model_unwraps_to_the_users_object() -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    plain = problems.make_model()
    model = accelerator.prepare(plain)
    assert is_compiled_module(model)
    assert accelerator.unwrap_model(model) is model
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is plain
    assert list(accelerator.get_state_dict(model)) == list(plain.state_dict())


def test_what_is_compiled_around_a_wrapper_is_unwrapped_and_stays_compiled() -> None:
    plain = nn.Linear(2, 1)
    compiled: Any = torch.compile(nn.DataParallel(plain), backend="eager")
    inner: Any = extract_model_from_parallel(compiled)
    assert is_compiled_module(inner) and inner._orig_mod is plain
    assert isinstance(compiled._orig_mod, nn.DataParallel)
    assert torch.equal(inner(torch.ones(1, 2)), plain(torch.ones(1, 2)))
    assert extract_model_from_parallel(compiled, keep_torch_compile=False) is plain


def compiled_after_prepare() -> float:
    """How far a few steps are from those of plain torch on the rows of all ranks."""
    accelerator = Accelerator(cpu=True)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    ours, plain = problems.make_model(), problems.make_model()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (ours, plain)]
    model, ours_optimizer = accelerator.prepare(ours, optimizers[0])
    compiled = torch.compile(model, backend="eager")
    for step in range(3):
        rows = [problems.make_rows(step, number, 4) for number in range(ranks)]
        accelerator.backward(F.cross_entropy(compiled(rows[rank][0]), rows[rank][1]))
        ours_optimizer.step()
        ours_optimizer.zero_grad()
        features, labels = map(torch.cat, zip(*rows, strict=True))
        F.cross_entropy(plain(features), labels).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def test_a_model_compiled_after_prepare_computes_what_plain_torch_does(run_distributed: Any) -> None:
    assert max(run_distributed(compiled_after_prepare, 2)) < 1e-5


# -- uneven inputs --------------------------------------------------------------------------------------

SAMPLES, BATCH = 11, 2


def join(even_batches: bool | None) -> tuple[dict[str, torch.Tensor], int, list[bool]]:
    accelerator = Accelerator(cpu=True)
    plain = problems.make_model()
    loader = DataLoader(TensorDataset(*problems.make_rows(0, 0, SAMPLES)), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1), loader)
    evenness = [loader.even_batches]
    steps = 0
    with accelerator.join_uneven_inputs([model], even_batches=even_batches):
        evenness.append(loader.even_batches)
        for rows, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(rows), labels))
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
    evenness.append(loader.even_batches)
    return problems.parameters(plain), steps, evenness


def join_by_hand() -> tuple[dict[str, torch.Tensor], int]:
    dist.init_process_group("gloo")
    plain = problems.make_model()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    rows, labels = problems.make_rows(0, 0, SAMPLES)
    batches = list(zip(rows.split(BATCH), labels.split(BATCH), strict=True))
    own = batches[dist.get_rank() :: dist.get_world_size()]
    with Join([model]):
        for part, targets in own:
            F.cross_entropy(model(part), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return problems.parameters(plain), len(own)


@pytest.mark.parametrize("world_size", [1, 4])
def test_uneven_inputs_train_as_torchs_join(run_distributed, world_size: int) -> None:
    results = run_distributed(join, world_size, False)
    expected = run_distributed(join_by_hand, world_size)
    for (parameters, steps, evenness), (other, count) in zip(results, expected, strict=True):
        assert problems.difference(parameters, other) < 1e-6
        assert steps == count
        assert evenness == ([True, False, True] if world_size > 1 else [True, True, True])


def test_without_an_override_loaders_stay_even(run_distributed) -> None:
    results = run_distributed(join, 4, None)
    assert [steps for _, steps, _ in results] == [2, 2, 2, 2]
    assert results[0][2] == [True, True, True]


def join_a_stranger() -> str:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError) as error:
        with accelerator.join_uneven_inputs([problems.make_model()]):
            pass
    return str(error.value)


def test_joining_a_model_that_is_not_prepared_is_refused(run_distributed) -> None:
    assert "Pass the models that accelerator.prepare() returned" in run_distributed(join_a_stranger, 2)[0]
    with Accelerator(cpu=True).join_uneven_inputs([problems.make_model()]):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"comm_hook": "fp61"}, "comm_hook is 'fp61'.*Did you mean 'fp16'"),
        ({"comm_wrapper": "bf61"}, "comm_wrapper is 'bf61'.*Did you mean 'bf16'"),
    ],
)
def test_an_unknown_hook_is_refused_with_the_nearest_name(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistributedDataParallelKwargs(**options)


def test_the_hook_that_fails_inside_torch_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'power_sgd'"):
        gradient_hook(DistributedDataParallelKwargs(comm_hook="batched_power_sgd"))
