"""``ParallelismConfig(sp_size=...)``: a loop as for DeepSpeed's sequence parallelism trains as one process does."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.distributed.nn import functional as differentiable
from torch.utils.data import DataLoader

from lockstep import Accelerator
from lockstep.errors import ConfigError, UsageError
from lockstep.utils import DeepSpeedPlugin, ParallelismConfig
from tests.parallel.split_problem import LENGTH, VOCABULARY, make_llama
from tests.refusals import expect_refusal
from tests.verify.cells import Messages

ROWS, BATCH, LR = 12, 2, 1e-2


def rows(hidden: int) -> list[dict[str, torch.Tensor]]:
    """Of each row the first labels are left out, as those of prompts: of ``hidden`` positions, or all of a chunk."""
    source = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=source)
    labels = tokens.clone()
    labels[:, :hidden] = -100
    return [{"input_ids": t, "labels": k} for t, k in zip(tokens, labels, strict=True)]


def whole(hidden: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer = (model := make_llama(1)), torch.optim.SGD(model.parameters(), LR)
    losses = []
    for batch in DataLoader(rows(hidden), batch_size=BATCH):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def train_on_sharded_rows(
    hidden: int, shards: int, stage: int
) -> tuple[list[float], dict[str, torch.Tensor], str, float]:
    torch.set_num_threads(1)
    messages = Messages()
    logger = logging.getLogger("lockstep.verify")
    logger.addHandler(messages)
    logger.setLevel(logging.INFO)
    config = ParallelismConfig(sp_size=2, sp_backend="deepspeed", dp_shard_size=shards)
    plugin = DeepSpeedPlugin(zero_stage=stage) if stage else None
    run = Accelerator(cpu=True, parallelism_config=config, deepspeed_plugin=plugin)
    model = make_llama(1)
    loader = DataLoader(rows(hidden), batch_size=BATCH // shards)
    model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), LR), loader)
    assert run.deepspeed_ulysses_dl_adapter(loader, model) is loader and len(loader) == ROWS // BATCH
    group = run.torch_device_mesh["sp"].get_group()
    losses = []
    for batch in loader:
        assert batch["input_ids"].shape[1] == batch["shift_labels"].shape[1] == LENGTH // 2
        loss = model(**batch).loss
        parts = differentiable.all_gather(loss, group=group)
        counts = differentiable.all_gather((batch["shift_labels"] != -100).sum(), group=group)
        total = sum(part * count for part, count in zip(parts, counts, strict=True) if count > 0)
        loss = total / max(sum(counts), 1)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(run.reduce(loss.detach(), "mean")))
        with pytest.raises(UsageError, match="loader gave"):
            model(**{name: value.clone() for name, value in batch.items()})
    with torch.no_grad():  # evaluation may see whole sequences
        one = {name: value[None] for name, value in rows(hidden)[0].items()}
        evaluated = float(model(**one).loss)
    return losses, run.get_state_dict(model), " ".join(messages.texts), evaluated


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("hidden", "shards", "stage"),
    [(0, 1, 0), (5, 1, 3), (LENGTH // 2 + 1, 1, 0)],
)
def test_a_loop_over_chunks_trains_as_one_process_does(
    run_distributed: Any, hidden: int, shards: int, stage: int
) -> None:
    losses, weights = whole(hidden)
    results = run_distributed(train_on_sharded_rows, 2 * shards, hidden, shards, stage, timeout_s=120)
    assert "was verified on the first batch: loss" in results[0][2]
    for found, state, _, evaluated in results:
        assert found == pytest.approx(losses, rel=1e-5)
        assert all(torch.allclose(state[name], value, atol=1e-5) for name, value in weights.items())
        model = make_llama(1)
        model.load_state_dict(weights)
        one = {name: value[None] for name, value in rows(hidden)[0].items()}
        assert evaluated == pytest.approx(model(**one).loss.item(), rel=1e-4)


def apart() -> None:
    run = Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2))
    model, loader = run.prepare(make_llama(1)), run.prepare(DataLoader(rows(0), batch_size=BATCH))
    expect_refusal(ConfigError, "sp_size", run.deepspeed_ulysses_dl_adapter, loader, model)
    plain = DataLoader(torch.arange(8), batch_size=2)
    *_, plain = run.prepare(make_llama(1), plain)
    expect_refusal(UsageError, "input_ids", lambda: next(iter(plain)))


def test_loaders_that_cannot_be_dealt_out_are_refused(run_distributed: Any) -> None:
    run_distributed(apart, 2)
