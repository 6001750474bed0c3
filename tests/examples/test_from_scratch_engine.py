"""The engine has the numbers of the lessons, and sends the bytes of their formulas."""

from __future__ import annotations

import copy
import importlib
import sys
from mmap import PAGESIZE
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lockstep import Accelerator
from lockstep.big_modeling import disk_offload
from lockstep.comm import CommCounter
from lockstep.nn import ColumnParallelLinear, ParallelMLP, VocabParallelEmbedding
from lockstep.offload.files import Pages
from lockstep.offload.weights import streamer_of
from lockstep.parallel.tensor import vocab_parallel_cross_entropy
from lockstep.parallel.zero import QuantizedReduceScatter
from lockstep.runtime import compare_versions
from lockstep.testing import WorkerPool
from tests.patching import module_of

LESSONS = Path(__file__).parents[2] / "examples" / "from_scratch"


def lesson(name: str) -> ModuleType:
    """The module of a lesson, which imports others of its folder."""
    if str(LESSONS) not in sys.path:
        sys.path.insert(0, str(LESSONS))
    return importlib.import_module(name)


def assert_close(ours: list[Tensor], theirs: list[Tensor], within: float = 1e-6) -> None:
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=within)


def train_with_engine(parallel: str, micro_batches: int, optimizer: str) -> tuple[list[Tensor], float]:
    """The parameters after three steps of the lessons' training, and the bytes that this rank sent in the last."""
    world = lesson("world")
    accelerator = Accelerator(cpu=True, parallel=parallel, gradient_accumulation_steps=micro_batches)
    rank, size = accelerator.process_index, accelerator.num_processes
    plain = world.small_model()
    names = [name for name, _ in plain.named_parameters()]
    model, stepping = accelerator.prepare(plain, getattr(world, optimizer)(plain.parameters()))
    for step in range(3):
        inputs, targets = (world.share(tensor, rank, size) for tensor in world.batch(step))
        with CommCounter() as counter:
            pairs = zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True)
            for micro_inputs, micro_targets in pairs:
                with accelerator.accumulate(model):
                    accelerator.backward(world.mean_loss(model, micro_inputs, micro_targets))
                    stepping.step()
                    stepping.zero_grad()
    weights = accelerator.get_state_dict(model)
    return [weights[name] for name in names], counter.wire_bytes()


def train_from_scratch(name: str, *arguments: Any) -> tuple[list[Tensor], float]:
    """The same from a lesson, with the bytes of a step as the engine's counter counts them."""
    dist.init_process_group("gloo")
    module = lesson(name)
    with CommCounter() as counter:
        trained = module.train(3, *arguments)
    sent = sum(record.wire_bytes for record in counter.records if record.operation != "broadcast")
    if name == "zero3":
        trained = module.whole_parameters(trained[0])
    return trained[0] if isinstance(trained, tuple) else trained, float(sent) / 3


# lesson -> the engine's words for it, micro-batches, optimizer, and the bytes of a step in units of the model's,
# times (N - 1) / N, on 4 processes.
SAME_TRAINING = {
    "ddp_buckets": ("ddp", 1, "sgd", 2),
    "zero1": ("zero=1", 2, "adam", 2),
    "zero2": ("zero=2", 2, "adam", 3),
    # So small a model would be one group, which is gathered once.
    "zero3": ("zero=3 blocks=Linear", 2, "adam", 6),
}


@pytest.mark.parametrize("name", SAME_TRAINING)
def test_the_engine_has_the_numbers_and_the_bytes_of_the_lesson(worker_pool: WorkerPool, name: str) -> None:
    parallel, micro_batches, optimizer, times = SAME_TRAINING[name]
    engine = worker_pool.run(train_with_engine, 4, parallel, micro_batches, optimizer)
    scratch = worker_pool.run(train_from_scratch, 4, name)
    for (weights, sent), (expected, sent_from_scratch) in zip(engine, scratch, strict=True):
        assert_close(weights, expected)
        formula = times * 3 / 4 * 4 * 484
        assert sent_from_scratch == formula
        # Beside the gradients, ranks of the engine compare a few numbers, as many for any model.
        assert formula <= sent <= formula + 300


def tensor_parallel_by_both() -> None:
    dist.init_process_group("gloo")
    tp, size = lesson("tensor_parallel"), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,))
    # From one seed the engine's layers have the weights of plain ones.
    torch.manual_seed(0)
    engine = ParallelMLP(tp.WIDTH, tp.HIDDEN, mesh=mesh)
    engine_embedding = VocabParallelEmbedding(tp.VOCABULARY, tp.WIDTH, mesh=mesh)
    engine_head = ColumnParallelLinear(tp.WIDTH, tp.VOCABULARY, mesh=mesh)
    torch.manual_seed(0)
    scratch = tp.ParallelMLP(nn.Linear(tp.WIDTH, tp.HIDDEN), nn.Linear(tp.HIDDEN, tp.WIDTH))
    embedding = tp.VocabParallelEmbedding(nn.Embedding(tp.VOCABULARY, tp.WIDTH))
    head = tp.ColumnParallelLinear(nn.Linear(tp.WIDTH, tp.VOCABULARY))

    tokens, targets = torch.randint(tp.VOCABULARY, (2, 48), generator=torch.Generator().manual_seed(1))
    assert_close([embedding(tokens)], [engine_embedding(tokens)])
    inputs, sent = torch.randn(48, tp.WIDTH, generator=torch.Generator().manual_seed(2)), []
    results = []
    for mlp in (scratch, engine):
        given = inputs.clone().requires_grad_()
        with CommCounter() as counter:
            outputs = mlp(given)
            outputs.square().sum().backward()
        results.append([outputs, given.grad])
        sent.append(counter.wire_bytes())
    assert_close(*results, within=1e-5)
    assert sent == [2 * 2 * (size - 1) / size * inputs.nbytes] * 2

    logits = DTensor.from_local(engine_head(inputs), mesh, [Shard(1)])
    ours = tp.vocab_parallel_cross_entropy(head(inputs), targets)
    assert_close([ours], [vocab_parallel_cross_entropy(logits, targets)])


def test_the_engines_parallel_layers_are_those_of_the_lesson(worker_pool: WorkerPool) -> None:
    worker_pool.run(tensor_parallel_by_both, 4)


class Deep(nn.Module):
    """The lesson's model, with the loss in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = lesson("pipeline").deep_model()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return F.mse_loss(inputs, targets)


def pipeline_by_engine() -> tuple[list[Tensor], float]:
    """On rank 0 the gradients of the whole model, as what a step with a learning rate of 1 changes; bytes sent."""
    accelerator = Accelerator(cpu=True, parallel="pp=4 schedule=1f1b micro_batches=8 verify=off")
    plain = Deep()
    before = [parameter.detach().clone() for parameter in plain.parameters()]
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
    inputs, _ = lesson("world").batch(0)
    with CommCounter() as counter:
        accelerator.backward(model(inputs, inputs.roll(1, dims=1)))
    optimizer.step()
    after = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return [], counter.wire_bytes("send")
    names = [name for name, _ in Deep().named_parameters()]
    gradients = [old - after[name] for old, name in zip(before, names, strict=True)]
    return gradients, counter.wire_bytes("send")


def pipeline_from_scratch() -> list[Tensor]:
    """The gradients of this process's layers."""
    dist.init_process_group("gloo")
    pipeline = lesson("pipeline")
    stage = pipeline.run_schedule(pipeline.one_f_one_b)
    return [parameter.grad for parameter in stage.parameters]


def test_the_engines_pipeline_has_the_gradients_of_the_lesson(worker_pool: WorkerPool) -> None:
    parts = worker_pool.run(pipeline_from_scratch, 4)
    expected = [gradient for part in parts for gradient in part]
    results = worker_pool.run(pipeline_by_engine, 4)
    assert_close(results[0][0], expected)
    inputs, _ = lesson("world").batch(0)
    first, *middle, last = (sent for _, sent in results)
    # From 2.12 on torch adds 4 bytes, from 2.15 on only onward.
    greeting = 4 if compare_versions("torch", ">=", "2.12.0") else 0
    greeting_back = 0 if compare_versions("torch", ">=", "2.15.0") else greeting
    # As in the lesson, gradients of a batch of activations go back.
    assert last == inputs.nbytes + greeting_back
    # Onward go the activations, and with them the targets.
    assert first == 2 * inputs.nbytes + greeting
    assert middle == [first + last] * 2


def int8_by_both() -> None:
    dist.init_process_group("gloo")
    module, size = lesson("int8_gradients"), dist.get_world_size()
    gradient = torch.randn(size * 1024, generator=torch.Generator().manual_seed(dist.get_rank()))
    engine, sent = torch.empty(1024), []
    with CommCounter() as counter:
        QuantizedReduceScatter(8)(engine, gradient, dist.group.WORLD, dist.ReduceOp.AVG)
    sent.append(counter.wire_bytes())
    with CommCounter() as counter:
        ours = module.quantized_reduce_scatter(gradient)
    sent.append(counter.wire_bytes())
    assert_close([ours], [engine], within=1e-7)
    assert sent == [(size - 1) * 1024 * (1 + 4 / 256)] * 2


def test_the_engines_8_bit_gradients_are_those_of_the_lesson(worker_pool: WorkerPool) -> None:
    worker_pool.run(int8_by_both, 4)


def bytes_that_are_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the size of each range of pages that the system is asked to read from a mapped file."""
    pages = module_of(Pages)
    found, advise = [], pages._advise

    def counting(start: int, nbytes: int, advice: int) -> int:
        if advice == pages._POPULATE_READ:
            found.append(nbytes)
        return advise(start, nbytes, advice)

    monkeypatch.setattr(pages, "_advise", counting)
    return found


def test_the_engines_streamed_model_has_the_outputs_and_reads_the_bytes_of_the_lesson(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = lesson("streaming")
    torch.manual_seed(0)
    model = nn.Sequential(*(module.new_block() for _ in range(module.BLOCKS)))
    module.write(model, tmp_path)
    batches = [torch.randn(8, module.WIDTH) for _ in range(3)]
    scratch = module.StreamedModel(tmp_path)
    ours = scratch(batches)

    a_block = module.size_of(model[0].state_dict())
    room = 2 * (a_block + 2 * PAGESIZE)  # for two blocks, as the lesson has; files are read in whole pages
    read = bytes_that_are_read(monkeypatch)
    streamed = disk_offload(copy.deepcopy(model), tmp_path / "engine", memory_budget=room)
    streamer = streamer_of(streamed)
    assert streamer is not None
    with torch.no_grad():
        theirs = list(streamed(torch.cat(batches)).split(8))
        streamer.finish()
        # Not to the bit: the engine's products have the rows of all batches, and MKL's also depend on where a buffer
        # lies, so that a kernel may add up in another order. Beside them plain torch's own distance from float64.
        plain, exact = [model(batch) for batch in batches], copy.deepcopy(model).double()
        right = [exact(batch.double()) for batch in batches]
        rounding = max((a - b).abs().max().item() for a, b in zip(plain, right, strict=True))
        assert_close([output.double() for output in (*ours, *theirs)], right * 2, within=4 * rounding)

        # Both read the model once for three batches; the engine also the first block of the next forward.
        assert scratch.reader.read_bytes == module.BLOCKS * a_block
        assert len(read) == module.BLOCKS + 1
        # One after another, three batches are three times the model.
        for batch in batches[1:]:
            streamed(batch)
            streamer.finish()
    assert len(read) == 3 * module.BLOCKS + 1
    assert all(a_block <= nbytes < a_block + 2 * PAGESIZE for nbytes in read)
    assert scratch.reader.most_held == 2 and a_block < streamer.counters.peak_bytes <= room
