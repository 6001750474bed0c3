"""Training with state outside of the device is training: bit for bit, in one process and under ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Accelerator
from lockstep.errors import ConfigError, OffloadError
from lockstep.offload.files import region_of
from tests.refusals import expect_refusal

WIDTH, STEPS, MICRO_BATCHES = 24, 5, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + hidden


class Model(nn.Module):
    """Blocks, modules outside of them, tied weights and a frozen one."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].up.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


OPTIMIZERS = {
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def batches(rank: int = 0) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randint(16, (3, 8), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train_plain(optimizer_name: str) -> list[torch.Tensor]:
    """The oracle: a loop in plain torch."""
    torch.manual_seed(0)
    model = Model()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = batches()
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            (loss_of(model, next(data)) / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    return [tensor.clone() for tensor in model.state_dict().values()]


def train(parallel: str, optimizer_name: str) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, parallel=parallel, gradient_accumulation_steps=MICRO_BATCHES)
    torch.manual_seed(0)
    model: Any = Model()
    optimizer: Any = OPTIMIZERS[optimizer_name](model.parameters())
    scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9 ** (1 / accelerator.num_processes))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    data = batches(accelerator.process_index)
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, next(data)))
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return accelerator, model, optimizer


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("offload", "place"), [("optimizer", "folder"), ("params", "cpu"), ("all", "folder")]
)
def test_one_process_trains_to_the_bits_of_the_plain_loop(
    offload: str, place: str, optimizer: str, tmp_path: Path
) -> None:
    parallel = f"offload={offload}" + (f" offload_to={tmp_path}" if place == "folder" else "")
    accelerator, model, prepared = train(parallel, optimizer)
    found = list(accelerator.get_state_dict(model).values())
    for ours, plain in zip(found, train_plain(optimizer), strict=True):
        assert torch.equal(ours, plain)
    in_files = place == "folder"
    assert all(
        (region_of(p.data) is not None) == (in_files and offload != "optimizer") for p in model.parameters()
    )
    moments = [
        value
        for state in prepared.state.values()
        for value in state.values()
        if getattr(value, "ndim", 0) > 0
    ]
    assert moments
    assert all((region_of(m) is not None) == (in_files and offload != "params") for m in moments)
    assert list(tmp_path.iterdir()) == []  # files have no name
    accelerator.free_memory()


def state_after_training(parallel: str, optimizer: str) -> tuple[list[torch.Tensor], int, int]:
    accelerator, model, _ = train(parallel, optimizer)
    held = accelerator.state_bytes()
    state = [tensor.clone() for tensor in accelerator.get_state_dict(model).values()]
    accelerator.free_memory()
    return state, held.on_disk, held.weights + held.optimizer


COMPARED = {
    ("zero=1", "adamw fused"): ("optimizer PATH", "all PATH"),
    ("zero=2", "sgd"): ("params PATH", "all"),
    ("zero=3 forward_prefetch", "adamw fused"): ("optimizer PATH", "params", "all PATH"),
    ("ddp", "adamw"): ("optimizer", "optimizer PATH"),
}


def compare_with_unoffloaded(folder: str) -> list[str]:
    """What differs, on this rank, between strategies with and without offload."""
    wrong = []
    for (strategy, optimizer), offloads in COMPARED.items():
        expected, on_disk, _ = state_after_training(strategy, optimizer)
        assert on_disk == 0
        for offload in offloads:
            words = f"{strategy} offload={offload.replace('PATH', f'offload_to={folder}')}"
            state, on_disk, held = state_after_training(words, optimizer)
            if not all(torch.equal(a, b) for a, b in zip(state, expected, strict=True)):
                wrong.append(words)
            if bool(on_disk) != offload.endswith("PATH"):
                wrong.append(f"{words}: {on_disk} of {held} bytes on disk")
    return wrong


def test_two_ranks_train_to_the_bits_of_the_same_strategy_without_offload(
    run_distributed: Any, tmp_path: Path
) -> None:
    assert run_distributed(compare_with_unoffloaded, 2, str(tmp_path), timeout_s=120) == [[], []]


def continue_from_checkpoint(folder: str, parallel: str) -> list[torch.Tensor]:
    """Train, save, load into new objects, train on; the state after that."""
    accelerator, model, optimizer = train(parallel, "adamw fused")
    accelerator.save_state(folder)
    accelerator.free_memory()
    accelerator = Accelerator(cpu=True, parallel=parallel)
    fresh: Any = Model()
    optimizer = OPTIMIZERS["adamw fused"](fresh.parameters())
    scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = accelerator.prepare(fresh, optimizer, scheduler)
    accelerator.load_state(folder)
    for tokens, _ in zip(batches(7), range(3), strict=False):
        accelerator.backward(loss_of(model, tokens))
        optimizer.step()
        optimizer.zero_grad()
    state = [tensor.clone() for tensor in accelerator.get_state_dict(model).values()]
    accelerator.free_memory()
    return state


def test_a_checkpoint_goes_on_with_and_without_offload_alike(tmp_path: Path) -> None:
    expected = continue_from_checkpoint(str(tmp_path / "plain"), "auto")
    for offload in ("optimizer", f"all offload_to={tmp_path / 'files'}"):
        state = continue_from_checkpoint(str(tmp_path / offload.split()[0]), f"offload={offload}")
        assert all(torch.equal(a, b) for a, b in zip(state, expected, strict=True)), offload


def test_parameters_of_a_model_on_meta_are_made_in_the_file(tmp_path: Path) -> None:
    torch.manual_seed(5)
    plain = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    torch.manual_seed(5)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    accelerator = Accelerator(cpu=True, parallel=f"offload=all offload_to={tmp_path}")
    prepared = accelerator.prepare(model)
    for ours, theirs in zip(prepared.parameters(), plain.parameters(), strict=True):
        assert region_of(ours.data) is not None
        assert torch.equal(ours, theirs)
    accelerator.free_memory()


def test_what_cannot_be_offloaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="offload_budget"):
        Accelerator(cpu=True, parallel="offload=optimizer offload_budget=1GB")
    accelerator = Accelerator(cpu=True, parallel=f"offload=all offload_to={tmp_path} offload_budget=1KB")
    model = Model()
    expect_refusal(OffloadError, "1000 bytes", accelerator.prepare, model)
    assert all(region_of(parameter.data) is None for parameter in model.parameters())
    accelerator.free_memory()
    file = tmp_path / "file"
    file.touch()
    accelerator = Accelerator(cpu=True, parallel=f"offload=all offload_to={file}")
    with pytest.raises(OffloadError):
        accelerator.prepare(Model())
    accelerator.free_memory()


def ranks_without_zero() -> str:
    try:
        Accelerator(cpu=True, parallel="offload=params")
    except ConfigError as error:
        return str(error)
    return ""


def test_several_processes_share_parameters_before_they_offload_them(run_distributed: Any) -> None:
    assert all(
        "Add zero=1, zero=2 or zero=3" in message for message in run_distributed(ranks_without_zero, 2)
    )
