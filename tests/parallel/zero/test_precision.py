"""bf16 and fp16 under ZeRO: the numbers of plain torch with fp32 masters, and the types that the table says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Accelerator, AutocastKwargs, GradScalerKwargs
from lockstep.comm import CommCounter
from lockstep.plan import NONE, dtypes
from lockstep.utils import Parallel
from parallel import zero_precision_problem as oracle
from parallel import zero_problem as problem
from parallel.plain import full
from parallel.small_groups import groups_in_stage_3

SCALE = 1024.0
NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "int8",
    torch.uint8: "int8",
    None: NONE,
}
FORMS = [(1, 3), (2, 1), (2, 3), (3, 3)]  # stage, accumulation


def accelerator_of(parallel: str, precision: str, accumulation: int = 1, **options: Any) -> Accelerator:
    return Accelerator(
        cpu=True,
        mixed_precision=precision,
        parallel=parallel,
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=[GradScalerKwargs(init_scale=SCALE), *options.pop("handlers", [])],
        **options,
    )


def torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


# -- the numbers ------------------------------------------------------------------------------------------


def train(
    stage: int, options: str, precision: str, accumulation: int, overflow_at: int = -1
) -> oracle.Result:
    """The script as a user writes it; in step ``overflow_at`` the loss of the last rank alone is infinite."""
    accelerator = accelerator_of(f"zero={stage}{options}", precision, accumulation)
    model = problem.make_model()
    optimizer = problem.make_optimizer("adamw", model)
    with groups_in_stage_3(f"zero={stage}", problem.PAIR_BYTES):
        model, optimizer = accelerator.prepare(model, optimizer)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    result = oracle.Result()
    own_losses: list[torch.Tensor] = []
    for i, (tokens, labels) in enumerate(problem.make_batches(oracle.STEPS * accumulation)):
        with accelerator.accumulate(model):
            loss = problem.loss_of(model, tokens.chunk(world_size)[rank], labels.chunk(world_size)[rank])
            own_losses.append(loss.detach())
            if i == overflow_at * accumulation and accelerator.is_last_process:
                loss = loss * float("inf")
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                result.norms.append(accelerator.clip_grad_norm_(model.parameters(), problem.CLIP).item())
            optimizer.step()
            if accelerator.sync_gradients:
                if len(own_losses) == oracle.STEPS * accumulation:
                    result.gradients = {
                        n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None
                    }
                result.skipped.append(accelerator.optimizer_step_was_skipped)
                result.scales.append(accelerator.scaler.get_scale() if accelerator.scaler else 1.0)
            optimizer.zero_grad()
    means = accelerator.reduce(torch.stack(own_losses), "mean")
    result.losses = means.view(oracle.STEPS, accumulation).mean(1).tolist()
    result.parameters = {n: full(p) for n, p in model.named_parameters()}
    return result


def train_all(options: str, precision: str, overflow_at: int = -1) -> list[oracle.Result]:
    return [train(stage, options, precision, k, overflow_at) for stage, k in FORMS]


def expected_of(
    stage: int, accumulation: int, precision: str, reduce: torch.dtype, ranks: int, overflow_at: int = -1
) -> oracle.Result:
    policy = oracle.Policy(oracle.DTYPES[precision], reduce, whole_window=stage == 1, ranks=ranks)
    scale = SCALE if precision == "fp16" else 1.0
    return oracle.train("adamw", policy, accumulation, scale, overflow_at)


def clipped(result: oracle.Result) -> dict[str, torch.Tensor]:
    factor = min(1.0, problem.CLIP / (result.norms[-1] + 1e-6))
    return {name: gradient * factor for name, gradient in result.gradients.items()}


@pytest.mark.parametrize("precision", ["fp16"])
@pytest.mark.parametrize("world_size", [2])
def test_training_with_reduction_in_fp32_equals_plain_torch_with_fp32_masters(
    run_distributed, world_size: int, precision: str
) -> None:
    found = run_distributed(train_all, world_size, " reduce=fp32", precision)
    for results in zip(FORMS, *found, strict=True):
        (stage, accumulation), *ranks = results
        expected = expected_of(stage, accumulation, precision, torch.float32, world_size)
        # From 2.15 on torch adds up the gradients of one weight's two uses in fp32, where it accumulates in fp32.
        rounds = torch_version() >= (2, 15) and stage == 1 and accumulation > 1
        slack = torch.finfo(oracle.DTYPES[precision]).eps if rounds else 0.0
        for result in ranks:
            assert result.losses == pytest.approx(expected.losses, rel=1e-6 + slack)
            assert result.norms == pytest.approx(expected.norms, rel=1e-5 + slack)
            assert problem.difference(result.gradients, clipped(expected)) < 1e-4 + slack
            assert problem.difference(result.parameters, expected.parameters) < 1e-5 + slack
            assert result.skipped == expected.skipped


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("world_size", [2])
def test_training_with_reduction_in_16_bits_equals_plain_torch_within_their_rounding(
    run_distributed, world_size: int, precision: str
) -> None:
    compute = oracle.DTYPES[precision]
    # Two numbers have one sum; four are added in an order that is gloo's own.
    slack = 4 * torch.finfo(compute).eps if world_size == 4 else 1e-5
    found = run_distributed(train_all, world_size, "", precision)
    for results in zip(FORMS, *found, strict=True):
        (stage, accumulation), *ranks = results
        expected = expected_of(stage, accumulation, precision, compute, world_size)
        for result in ranks:
            assert result.losses == pytest.approx(expected.losses, rel=slack)
            assert result.norms == pytest.approx(expected.norms, rel=slack)
            assert problem.difference(result.parameters, expected.parameters) < slack
            assert result.skipped == expected.skipped
        for result in ranks[1:]:
            assert problem.difference(result.parameters, ranks[0].parameters) == 0


# -- fp16: steps that are skipped -------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2])
def test_an_overflow_on_one_rank_skips_the_step_and_halves_the_scale_on_all(
    run_distributed, world_size: int
) -> None:
    found = run_distributed(train_all, world_size, " reduce=fp32", "fp16", 2)
    for results in zip(FORMS, *found, strict=True):
        (stage, accumulation), *ranks = results
        expected = expected_of(stage, accumulation, "fp16", torch.float32, world_size, overflow_at=2)
        for result in ranks:
            assert result.skipped == expected.skipped == [step == 2 for step in range(oracle.STEPS)]
            assert result.scales == expected.scales == [SCALE] * 2 + [SCALE / 2] * (oracle.STEPS - 2)
            assert problem.difference(result.parameters, expected.parameters) < 1e-5


class Narrow(nn.Module):
    """Fewer rows than ranks, so that some shards are empty; and two scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.scale, self.shift = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + self.shift


def overflow_of_one(parallel: str, where: str, rank: int) -> list[tuple[bool, float, bool]]:
    """(skipped, scale, changed) of three steps; in the second, one rank alone has one infinite gradient."""
    torch.manual_seed(0)
    accelerator = accelerator_of(parallel, "fp16")
    model = Narrow()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    found = []
    for step in range(3):
        before = {n: full(p) for n, p in model.named_parameters()}
        outputs = model(torch.ones(2, 3))
        hook = None
        if step == 1 and accelerator.process_index == rank:
            if where == "row":
                outputs.register_hook(lambda g: torch.stack([g[:, 0] * float("inf"), g[:, 1]], 1))
            else:
                hook = model.scale.register_hook(lambda g: g * float("inf"))
        accelerator.backward(outputs.square().sum())
        if hook is not None:
            hook.remove()
        optimizer.step()
        optimizer.zero_grad()
        after = {n: full(p) for n, p in model.named_parameters()}
        found.append(
            (
                accelerator.optimizer_step_was_skipped,
                accelerator.scaler.get_scale(),
                problem.difference(after, before) > 0,
            )
        )
    return found


@pytest.mark.parametrize(("rank", "where"), [(3, "row"), (0, "scale")])
def test_one_infinite_gradient_is_known_to_ranks_whose_shards_are_empty(
    run_distributed, rank: int, where: str
) -> None:
    for parallel in ("zero=1", "zero=3 replicate=2"):
        for found in run_distributed(overflow_of_one, 4, parallel, where, rank):
            assert found == [(False, SCALE, True), (True, SCALE / 2, False), (False, SCALE / 2, True)]


# -- types ------------------------------------------------------------------------------------------------


def observed_types(parallel: str, precision: str) -> dict[str, str]:
    """The rows of the table, as seen in a step of two micro-batches."""
    accelerator = accelerator_of(parallel, precision, accumulation=2)
    model = problem.make_model(64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    seen: dict[str, Any] = {"stored weights": model.layers[0].up.weight.dtype}

    def note(gradient: torch.Tensor) -> None:
        seen.setdefault("unsharded gradients", gradient.dtype)

    def look(module: Any, inputs: Any, output: torch.Tensor) -> None:
        seen["gathered weights"], seen["activations"] = module.weight.dtype, output.dtype
        module.weight.register_hook(note)

    model.layers[0].up.register_forward_hook(look)
    with CommCounter() as counter:
        for tokens, labels in problem.make_batches(2):
            with accelerator.accumulate(model):
                accelerator.backward(problem.loss_of(model, tokens, labels))
                if not accelerator.sync_gradients and parallel.startswith("zero=1"):
                    # What the window's micro-batches are added up in.
                    (seen["unsharded gradients"],) = {
                        g.dtype for g in accelerator._preparation.gradients if g.ndim
                    }
                optimizer.step()
    weight = model.layers[0].up.weight
    seen["sharded gradients"] = weight.grad.dtype
    seen["optimizer state"] = optimizer.state[weight]["exp_avg"].dtype
    seen["loss scale"] = accelerator.scaler._get_scale_async().dtype if accelerator.scaler else None
    for row, operations in (
        ("weights on the wire", {"all_gather", "broadcast"}),
        ("gradients on the wire", {"reduce_scatter", "all_to_all"}),
    ):
        records = [r for r in counter.records if r.operation in operations and r.payload_bytes > 4096]
        (seen[row],) = {record.dtype for record in records}
    return {row: NAMES[dtype] for row, dtype in seen.items()}


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_every_tensor_has_the_type_that_the_table_says(run_distributed, precision: str) -> None:
    for parallel in (
        "zero=1",
        "zero=2",
        "zero=3",
        "zero=1 reduce=fp32",
        "zero=3 reduce=fp32",
        "zero=2 quantized_weights quantized_gradients",
    ):
        expected = dtypes(Parallel.parse(parallel), precision)
        del expected["gradient reduction"]  # its numbers are tested above
        for observed in run_distributed(observed_types, 2, parallel, precision):
            assert observed == expected, parallel


class Timed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, *, timestep: torch.Tensor) -> torch.Tensor:
        self.seen += [x.dtype, timestep.dtype, timestep.item(), self.linear.weight.dtype]
        return self.linear(x)


def call_timed(enabled: bool) -> list[Any]:
    accelerator = accelerator_of("zero=3", "bf16", handlers=[AutocastKwargs(enabled=enabled)])
    model = accelerator.prepare(Timed())
    outputs = model(torch.ones(2, 4), timestep=torch.tensor(999.0))
    accelerator.backward(outputs.sum())
    return [*model.seen, outputs.dtype]


def test_inputs_reach_the_model_in_their_own_type(run_distributed) -> None:
    for seen in run_distributed(call_timed, 2, True):
        assert seen == [torch.float32, torch.float32, 999.0, torch.bfloat16, torch.float32]


def test_without_autocast_inputs_are_cast_to_the_type_of_the_weights(run_distributed) -> None:
    bf16 = torch.bfloat16
    for seen in run_distributed(call_timed, 2, False):
        assert seen == [bf16, bf16, 1000.0, bf16, torch.float32]


# -- models with something about them ---------------------------------------------------------------------


def make_normalised() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
            nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
            nn.Flatten(),
            nn.Linear(4, 5),
        )


def images(rank: int) -> torch.Tensor:
    return torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(rank))


def train_normalised(
    precision: str, blocks: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """Gradients, buffers, and what the model says in evaluation."""
    accelerator = accelerator_of(f"zero=3 reduce=fp32 blocks={blocks}", precision)
    model = accelerator.prepare(make_normalised())
    accelerator.backward(model(images(accelerator.process_index)).square().mean())
    accelerator.unscale_gradients()
    scale = SCALE if precision == "fp16" else 1.0
    found = {n: full(p.grad) / scale for n, p in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        outputs = model(images(9))
    return found, {n: b.clone() for n, b in model.named_buffers()}, outputs


@pytest.mark.parametrize(("precision", "blocks"), [("bf16", "Sequential"), ("fp16", "Conv2d,BatchNorm2d")])
def test_batch_norm_equals_plain_autocast(run_distributed, precision: str, blocks: str) -> None:
    model, total = make_normalised(), {}
    for rank in (1, 0):  # running statistics are those of rank 0
        model.load_state_dict(make_normalised().state_dict())
        with torch.autocast("cpu", oracle.DTYPES[precision]):
            outputs = model(images(rank))
        (outputs.float().square().mean() * (SCALE if precision == "fp16" else 1.0)).backward()
    scale = 2 * (SCALE if precision == "fp16" else 1.0)
    total = {n: p.grad / scale for n, p in model.named_parameters()}
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", oracle.DTYPES[precision]):
        outputs = model(images(9)).float()
    results = run_distributed(train_normalised, 2, precision, blocks)
    for found, _, evaluated in results:
        assert problem.difference(found, total) < 1e-5
        assert evaluated.dtype is torch.float32
        torch.testing.assert_close(evaluated, outputs, rtol=1e-6, atol=1e-6)
    buffers = dict(model.named_buffers())
    assert all(torch.equal(results[0][1][name], buffer) for name, buffer in buffers.items())
