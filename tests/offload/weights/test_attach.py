"""Models run with weights that are streamed."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.errors import OffloadError, UsageError
from lockstep.offload.weights import Streamer, find_weight_groups, stop_streaming, stream_weights, streamer_of
from tests.offload.models import Blocks, map_weights
from tests.refusals import expect_refusal

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="Linux tells what is mapped")
CPU = torch.device("cpu")
WORDS = torch.arange(5)


@pytest.fixture
def plain() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


def streamed(plain: Blocks, folder: Path, budget_blocks: int | None = 4, writable: bool = False) -> Blocks:
    """A copy whose weights are streamed from a file, with room for so many blocks."""
    model = map_weights(copy.deepcopy(plain), folder / "weights", writable)
    groups = find_weight_groups(model, model.named_blocks())
    block = 4096 * (groups[1].nbytes // 4096 + 2)
    stream_weights(model, groups, CPU, None if budget_blocks is None else budget_blocks * block)
    return model


def same_training(model: nn.Module, plain: nn.Module, steps: int) -> None:
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, plain)]
    for step in range(steps):
        words = (WORDS + step) % 16
        losses = [nn.functional.cross_entropy(one(words), words) for one in (model, plain)]
        assert torch.equal(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_forwards_give_the_same_bits_and_load_what_has_no_room(plain: Blocks, tmp_path: Path) -> None:
    model = streamed(plain, tmp_path)
    streamer = streamer_of(model)
    assert isinstance(streamer, Streamer)
    for words in (WORDS, WORDS.flip(0), WORDS[:2], WORDS):
        with torch.no_grad():
            assert torch.equal(model(words), plain(words))
        streamer.finish()
    groups = len(streamer.groups)
    assert groups == 8
    assert 4 * 3 <= streamer.counters.loads <= 4 * groups + 3
    assert streamer.budget / 2 < streamer.counters.peak_bytes <= streamer.budget
    assert streamer.counters.bytes_loaded > 3 * streamer.budget


def test_training_in_files_with_evaluation_between_is_that_in_memory(plain: Blocks, tmp_path: Path) -> None:
    model = streamed(plain, tmp_path, writable=True)
    same_training(model, plain, steps=2)
    with torch.inference_mode():
        assert torch.equal(model(WORDS), plain(WORDS))
        # Parts of it alone, in any order.
        hidden = torch.ones(2, 128)
        for index in (3, 0, 5, 5, 1):
            assert torch.equal(model.blocks[index](hidden), plain.blocks[index](hidden))
    same_training(model, plain, steps=2)
    streamer = streamer_of(model)
    assert streamer is not None and streamer.counters.peak_bytes <= streamer.budget
    stop_streaming(model)
    file = torch.from_file(str(tmp_path / "weights"), size=(tmp_path / "weights").stat().st_size // 4)
    assert torch.equal(file, torch.cat([parameter.detach().view(-1) for parameter in plain.parameters()]))


def test_dynamic_models_run_whatever_is_foreseen(tmp_path: Path) -> None:
    class Dynamic(Blocks):
        def forward(self, words: torch.Tensor, path: tuple[int, ...]) -> torch.Tensor:
            hidden = self.embedding(words)
            for index in path:
                hidden = self.blocks[index](hidden)
            return self.head(hidden)

    torch.manual_seed(0)
    plain = Dynamic()
    model = streamed(plain, tmp_path)
    for seed in range(8):
        path = tuple(torch.randint(0, 6, (6,), generator=torch.Generator().manual_seed(seed)).tolist())
        assert torch.equal(model(WORDS, path), plain(WORDS, path))
    streamer = streamer_of(model)
    assert streamer is not None and streamer.counters.peak_bytes <= streamer.budget


def test_without_a_budget_there_is_room_for_the_group_in_use_and_three_others(
    plain: Blocks, tmp_path: Path
) -> None:
    model = streamed(plain, tmp_path, budget_blocks=None)
    streamer = streamer_of(model)
    assert streamer is not None
    assert streamer.budget == 4 * max(map(streamer.mover.nbytes, streamer.groups))


def test_a_budget_below_the_largest_group_is_refused_and_nothing_attached(
    plain: Blocks, tmp_path: Path
) -> None:
    model = map_weights(copy.deepcopy(plain), tmp_path / "weights")
    groups = find_weight_groups(model, model.named_blocks())
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    threads = threading.active_count()
    expect_refusal(OffloadError, "Give 73728", stream_weights, model, groups, CPU, budget=4096)
    expect_refusal(OffloadError, "negative", stream_weights, model, groups, CPU, ahead=-1)
    assert streamer_of(model) is None and threading.active_count() == threads
    assert hooks == [
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()
    ]
    stream_weights(model, groups, CPU)
    expect_refusal(UsageError, "already", stream_weights, model, groups, CPU)


def test_after_streaming_has_stopped_the_model_is_plain(plain: Blocks, tmp_path: Path) -> None:
    model = streamed(plain, tmp_path)
    model(WORDS)
    stop_streaming(model)
    stop_streaming(model)
    assert streamer_of(model) is None
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert vars(model).keys() == vars(plain).keys()
    model.blocks[2] = copy.deepcopy(plain.blocks[2])
    assert torch.equal(model(WORDS), plain(WORDS))
    assert model.double()(WORDS).dtype == torch.float64


@pytest.mark.parametrize(
    "edit",
    [
        lambda model: model.blocks.__setitem__(2, nn.Identity()),
        lambda model: setattr(model.head, "bias", nn.Parameter(torch.ones(16))),
        lambda model: model.double(),
        lambda model: [parameter.data.mul_(2) for parameter in model.blocks[1].parameters()],
    ],
)
def test_a_model_that_was_changed_computes_with_what_it_has_now(plain: Blocks, tmp_path: Path, edit) -> None:
    model, expected = streamed(plain, tmp_path), copy.deepcopy(plain)
    model(WORDS)
    edit(model)
    edit(expected)
    for _ in range(2):
        assert torch.equal(model(WORDS), expected(WORDS))
    stop_streaming(model)


def test_a_file_that_was_truncated_is_an_error_in_forward(plain: Blocks, tmp_path: Path) -> None:
    model = streamed(plain, tmp_path)
    model(WORDS)
    os.truncate(tmp_path / "weights", 100_000)
    expect_refusal(OffloadError, "truncated to 100000 bytes", model, WORDS)
    for block in model.blocks[1:]:  # loaded or not, and not through the model's own forward
        expect_refusal(OffloadError, "truncated", block, torch.ones(128))


def test_copies_of_a_streamed_model_are_plain_models(plain: Blocks, tmp_path: Path) -> None:
    model = streamed(plain, tmp_path)
    torch.save(model, tmp_path / "model.pt")
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ):
        assert streamer_of(other) is None
        assert torch.equal(other(WORDS), plain(WORDS))
        same_training(other, copy.deepcopy(plain), steps=1)
        other.head = nn.Identity()
        other(WORDS)
        stop_streaming(other)
    assert streamer_of(model) is not None


def test_memory_and_thread_go_with_the_model(plain: Blocks, tmp_path: Path) -> None:
    model = streamed(plain, tmp_path)
    model(WORDS)
    streamer = streamer_of(model)
    assert streamer is not None
    (thread,) = streamer._thread._threads
    gone = weakref.ref(model), weakref.ref(model.head.weight)
    streamer.finish()
    del streamer, model
    gc.collect()
    thread.join(30)
    assert not thread.is_alive() and [reference() for reference in gone] == [None, None]


BUDGET = 60_000_000
_RUN = f"""
import sys, torch
from torch import nn
from lockstep.offload.weights import stop_streaming, stream_weights, streamer_of
from lockstep.offload.files import map_file
from lockstep.offload.weights import find_weight_groups

def peak(run):
    open("/proc/self/clear_refs", "w").write("5")  # forgets the former peak
    def status(key):
        return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
    before = status("VmRSS")
    run()
    return status("VmHWM") - before

width, layers = 1250, 32  # 6.25 MB each, 200 MB
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
file, offset = map_file(sys.argv[1]), 1236
for layer in model:
    weight = file[offset : offset + 4 * width * width].view(torch.float32).view(width, width)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    offset += 4 * width * width
x = torch.ones(2, width)
nn.Linear(width, width)(x)  # what torch takes for itself
groups = find_weight_groups(model, {{}})
streamer = stream_weights(model, groups, torch.device("cpu"), {BUDGET})
print(peak(lambda: [model(x) for _ in range(3)]))
print(streamer.counters.peak_bytes, streamer.counters.bytes_loaded)
stop_streaming(model)
print(peak(lambda: None))
print(peak(lambda: model(x)))
stream_weights(model, groups, torch.device("cpu"), {BUDGET})
model(x)  # ends while it streams
"""


def test_a_model_runs_in_memory_of_the_budget_alone(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.touch()
    os.truncate(path, 200_001_236)
    result = subprocess.run(
        [sys.executable, "-c", _RUN, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0 and not result.stderr, result.stderr
    grown, of_streamer, loaded, after, plain = map(int, result.stdout.split())
    assert BUDGET * 0.8 < of_streamer <= BUDGET
    assert of_streamer * 0.8 < grown <= BUDGET * 1.1
    assert loaded > 2 * 200_000_000
    assert after < 1_000_000
    assert plain > 190_000_000  # without streaming all of it stays
