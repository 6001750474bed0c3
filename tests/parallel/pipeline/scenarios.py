"""What the ranks of the pipeline tests run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lockstep.config import Schedule
from lockstep.errors import ConfigError, UsageError
from lockstep.model import find_blocks
from lockstep.parallel.pipeline import PipelineModel, PipelineOptions, split_model
from lockstep.runtime import start_runtime
from tests.parallel.pipeline import problem
from tests.parallel.pipeline.problem import GPT, Uneven, loss_of, seeded


def pipeline(model: nn.Module, options: PipelineOptions, blocks: tuple[str, ...] = ()) -> PipelineModel:
    torch.set_num_threads(1)
    runtime = start_runtime(cpu=True)
    mesh = init_device_mesh("cpu", (runtime.world_size,), mesh_dim_names=("pp",))
    return split_model(model, find_blocks(model, blocks), mesh, options)


def inside(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch, batch)


def outside(model: nn.Module, batch: Tensor) -> Tensor:
    return loss_of(model(batch), batch)


def in_steps(model: Any, batch: Tensor) -> Tensor:
    return model.train_step(loss_of, (batch,), (batch,))


@functools.cache
def expected(steps: int) -> tuple[list[float], list[dict[str, Tensor]]]:
    plain = seeded(GPT)
    return problem.train(plain, plain.named_parameters, outside, steps)


def trained(
    schedule: str, micro_batches: int, how: Callable[..., Tensor] = inside, steps: int = 4
) -> dict[str, Any]:
    """Differences from one process, and what this rank held and did."""
    model = pipeline(seeded(GPT), PipelineOptions(Schedule(schedule), micro_batches))
    got = problem.train(model, model.held_parameters, how, steps)
    return {
        "difference": problem.difference(got, expected(steps)),
        "executed": model.executed(),
        "names": [name for name, _ in model.held_parameters()],
        "state": list(model.state_dict()),
        "owned": list(model.owned()),
        "tied": model.tied(),
    }


def schedules() -> dict[str, Any]:
    found = {word: trained(word, 4) for word in problem.schedules()}
    is_main = start_runtime(cpu=True).is_main
    with pytest.warns(UserWarning, match="use train_step") if is_main else nullcontext():
        found["outside"] = trained("1f1b", 4, outside)
        for word in problem.schedules("zbv"):
            found["outside of a V"] = trained(word, 4, outside)
    found["train_step"] = trained("interleaved", 4, in_steps)
    return found


def loops() -> dict[str, Any]:
    """Gradients of loops with several forwards, against the same loop on one process."""
    plain, model = seeded(GPT), pipeline(seeded(GPT), PipelineOptions(micro_batches=4))
    for batch in problem.tokens(1):
        inside(model, batch)  # nothing is added to .grad without a backward
    found: dict[str, Any] = {"untouched": all(p.grad is None for _, p in model.held_parameters())}

    def same(loop: Callable[[nn.Module], None]) -> float:
        for one in (plain, model):
            one.zero_grad()
            loop(one)
        return problem.gradient_difference(problem.gradients(model), problem.gradients(plain))

    def accumulated(model: nn.Module, how: Callable[..., Tensor]) -> None:
        for batch in problem.tokens(3):
            (how(model, batch) / 3).backward()

    def weighted(model: nn.Module, how: Callable[..., Tensor]) -> None:
        first, second, _unused = (how(model, batch) for batch in problem.tokens(3))
        (0.25 * first + second * 3).backward()

    def synchronised_last(model: nn.Module, how: Callable[..., Tensor]) -> None:
        if not isinstance(model, PipelineModel):
            return accumulated(model, how)
        first, second, third = problem.tokens(3)
        with model.no_sync():
            (how(model, first) / 3).backward()
            (how(model, second) / 3).backward()
        (how(model, third) / 3).backward()

    for name, how in (("inside", inside), ("outside", outside)):
        for loop in (accumulated, weighted, synchronised_last):
            found[f"{name}, {loop.__name__}"] = same(functools.partial(loop, how=how))

    scaled = pipeline(seeded(GPT), PipelineOptions(micro_batches=4, loss_scale=lambda: 2.0**12))
    summed = pipeline(seeded(GPT), PipelineOptions(micro_batches=4, loss_reduction="sum"))
    batch = next(problem.tokens(1))
    plain.zero_grad()
    inside(plain, batch).backward()
    for name, other, factor in (("scaled", scaled, 1), ("summed", summed, 4)):
        (inside(other, batch) / factor).backward()
        found[name] = problem.gradient_difference(problem.gradients(other), problem.gradients(plain))

    with torch.no_grad():
        rows = next(problem.tokens(1, rows=5))
        found["evaluation"] = torch.allclose(model(rows), plain(rows), atol=1e-6)
        found["loss"] = abs((model(rows, rows) - plain(rows, rows)).item()) < 1e-6
        last = pipeline(seeded(GPT), PipelineOptions(outputs="last"))
        logits = last(rows)
        found["last"] = logits is None or torch.allclose(logits, plain(rows), atol=1e-6)
        found["last is None"] = logits is None
        pairs = zip(pipeline(seeded(History), PipelineOptions())(rows), seeded(History)(rows), strict=True)
        found["states"] = all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in pairs)
    return found


def models() -> dict[str, Any]:
    """Other kinds of models: differences of loss and gradients after one step, by schedule."""
    mask = torch.zeros(problem.ROWS, problem.LENGTH).masked_fill_(torch.eye(8, 12) > 0, -5.0)
    batch = next(problem.tokens(1))
    plain = seeded(Uneven)
    wanted = plain(batch, mask)
    wanted["loss"].backward()
    expected = problem.gradients(plain)
    found: dict[str, Any] = {}
    for word in problem.schedules("1f1b", "zero_bubble", "dualpipev"):
        model = pipeline(
            seeded(Uneven), PipelineOptions(Schedule(word), micro_batches=4, outputs="all"), ("BiasedBlock",)
        )
        for _ in range(2):  # the second time everything is there already
            model.zero_grad()
            out = model(batch, mask)
            out["loss"].backward()
        got = problem.gradients(model)
        found[word] = (
            abs(out["loss"].item() - wanted["loss"].item()),
            problem.gradient_difference(got, expected),
            torch.allclose(out["logits"], wanted["logits"], atol=1e-5),
            sorted(got),
        )
    found["names"] = sorted(expected)
    found["autocast"] = _half()
    found["recomputed"] = _recomputed()
    return found


def _half() -> float:
    """bfloat16 autocast around the call, against the same on one process, micro-batch by micro-batch."""
    batch = next(problem.tokens(1))
    plain, model = seeded(GPT), pipeline(seeded(GPT), PipelineOptions(micro_batches=4))
    for part in batch.chunk(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = inside(plain, part) / 4
        loss.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = inside(model, batch)
    loss.backward()
    return problem.gradient_difference(problem.gradients(model), problem.gradients(plain))


def _recomputed() -> float:
    from lockstep.config import Activation
    from lockstep.parallel import apply_activation_checkpointing

    batch = next(problem.tokens(1))
    plain, model = (
        seeded(GPT),
        pipeline(seeded(GPT), PipelineOptions(Schedule(problem.schedules("interleaved", "zbv")[-1]), 4)),
    )
    apply_activation_checkpointing(model.module, Activation.FULL, model.local_blocks())
    inside(plain, batch).backward()
    inside(model, batch).backward()
    return problem.gradient_difference(problem.gradients(model), problem.gradients(plain))


class Collects(GPT):
    """Adds what a hook has taken out of the first block to what the last one gave."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        taken: list[Tensor] = []
        inner = next(module for module in self.blocks[0].modules() if isinstance(module, nn.Linear))
        handle = inner.register_forward_hook(lambda module, args, out: taken.append(out))
        x = self.blocks(self.token(tokens))
        handle.remove()
        return total(self.norm(x) + taken[0].mean(), targets)


class Branches(GPT):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
            if x.abs().max() > 1e3:
                x = x / 2
        return total(x, targets)


class Reversed(GPT):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.token(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        return total(x, targets)


class Noise(GPT):
    """As in diffusion: what was added before the blocks is what they must predict."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        noise = torch.randn(*tokens.shape, problem.WIDTH)
        return (self.blocks(self.token(tokens) + noise) - noise).square().mean()


class History(GPT):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        seen = [self.token(tokens)]
        for block in self.blocks:
            seen.append(block(seen[-1]))
        return seen


class Bare(nn.Module):
    """A block without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def total(x: Tensor, targets: Tensor | None) -> Tensor:
    return x.sum() if targets is not None else x


def refusals() -> dict[str, str]:
    """What each mistake says; every rank raises."""
    runtime = start_runtime(cpu=True)
    batch = next(problem.tokens(1))

    def refused(call: Callable[[], Any]) -> str:
        with pytest.raises((ConfigError, UsageError)) as error:
            call()
        return str(error.value)

    def run(model: nn.Module, options: PipelineOptions | None = None, rows: Tensor = batch) -> str:
        return refused(lambda: inside(pipeline(model, options or PipelineOptions()), rows))

    found = {
        name: run(make())
        for name, make in {"hook": Collects, "branch": Branches, "order": Reversed, "noise": Noise}.items()
    }
    found["few blocks"] = run(GPT(layers=3), PipelineOptions(Schedule.INTERLEAVED))
    found["bare"] = refused(lambda: pipeline(_bare(), PipelineOptions(), ("Block", "Bare")))
    found["divide"] = run(GPT(), PipelineOptions(micro_batches=3))
    found["few"] = run(GPT(), PipelineOptions(micro_batches=1))
    for word in problem.schedules("dualpipev"):
        found["few for dualpipev"] = run(GPT(), PipelineOptions(Schedule(word), 2))
    found["batch"] = run(GPT(), rows=batch[:1])
    found["split"] = run(GPT(), PipelineOptions(split=("blocks.9",)))
    found["splits"] = run(GPT(), PipelineOptions(split=("blocks.1", "blocks.2")))
    found["first"] = run(GPT(), PipelineOptions(split=("blocks.0",)))
    found["per rank"] = run(GPT(), PipelineOptions(stages_per_rank=2))
    found["same batch"] = run(GPT(), rows=batch + runtime.rank)
    found["outputs"] = refused(lambda: outside(pipeline(GPT(), PipelineOptions(outputs="last")), batch))
    return found


def _bare() -> nn.Module:
    model = GPT(layers=2)
    model.blocks = nn.Sequential(model.blocks[0], Bare())
    return model


def divided() -> dict[str, Any]:
    """Parameters of each rank for splits that are named, and balanced by bytes."""
    held = {}
    v_shaped = [Schedule(name) for name in problem.schedules("zbv")]
    for name, options in {
        "bytes": PipelineOptions(),
        "named": PipelineOptions(split=("blocks.3",)),
        **dict.fromkeys(["V"] * len(v_shaped), PipelineOptions(*v_shaped)),
    }.items():
        model = pipeline(seeded(GPT), options)
        held[name] = list(model.local_blocks())
    return held
