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

from lockstep import Accelerator, BoundedStaleness
from lockstep.big_modeling import disk_offload
from lockstep.comm import CommCounter
from lockstep.nn import ColumnParallelLinear, MixtureOfExperts, ParallelMLP, VocabParallelEmbedding
from lockstep.offload.files import Pages
from lockstep.offload.weights import streamer_of
from lockstep.parallel.context import SequenceLayout, ring_attention
from lockstep.parallel.expert import expert_parallel
from lockstep.parallel.tensor import vocab_parallel_cross_entropy
from lockstep.parallel.zero import QuantizedReduceScatter
from lockstep.plan import action_lists, simulate
from lockstep.runtime import compare_versions
from lockstep.testing import WorkerPool
from lockstep.utils import GradScalerKwargs
from tests.marks import again, needs_exact_split_backward
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
        return module.whole_parameters(trained[0]), float(sent) / 3
    return trained[0] if isinstance(trained, tuple) else trained, float(sent) / 3


# lesson -> the engine's words for it, micro-batches, optimizer, and the bytes of a step in units of the model's,
# times (N - 1) / N, on 4 processes.
SAME_TRAINING = {
    "ddp_hooks": ("ddp", 1, "sgd", 2),
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


def test_the_engine_without_a_server_has_the_numbers_of_the_parameter_server(worker_pool: WorkerPool) -> None:
    workers, model_bytes = 3, 4 * 484
    (server, sent_by_server), *others = worker_pool.run(train_from_scratch, 1 + workers, "parameter_server")
    engine = worker_pool.run(train_with_engine, workers, "ddp", 1, "sgd")
    assert sent_by_server == workers * model_bytes
    assert [sent for _, sent in others] == [model_bytes] * workers
    ring = 2 * (workers - 1) / workers * model_bytes
    for weights, sent in engine:
        assert_close(weights, server)
        # Beside the gradients, ranks of the engine compare a few numbers, as many for any model.
        assert ring <= sent <= ring + 300 < sent_by_server


def all_reduce_by_both() -> None:
    accelerator = Accelerator(cpu=True)
    module, size = lesson("ring_all_reduce"), accelerator.num_processes
    tensor = torch.randn(size * 64, generator=torch.Generator().manual_seed(accelerator.process_index))
    sent = []
    with CommCounter() as counter:
        ours = module.all_reduce(tensor.clone())
    sent.append(counter.wire_bytes())
    with CommCounter() as counter:
        theirs = accelerator.reduce(tensor.clone(), reduction="sum")
    sent.append(counter.wire_bytes("all_reduce"))
    assert_close([ours], [theirs])
    assert sent == [2 * (size - 1) / size * tensor.nbytes] * 2


def test_the_engines_sum_over_ranks_is_that_of_the_ring(worker_pool: WorkerPool) -> None:
    worker_pool.run(all_reduce_by_both, 4)


def late_gradients_by_engine(steps: int) -> tuple[list[Tensor], int]:
    """Parameters after training with the engine's rotating server, with no staleness, and the bytes it sent."""
    world = lesson("world")
    accelerator = Accelerator(cpu=True)
    rank, size = accelerator.process_index, accelerator.num_processes
    plain = world.small_model()
    model, optimizer = accelerator.prepare(plain, world.sgd(plain.parameters()))
    with BoundedStaleness(accelerator, model, optimizer, staleness=0) as stale:
        for step in range(steps):
            inputs, targets = (world.share(tensor, rank, size) for tensor in world.batch(step))
            accelerator.backward(world.mean_loss(model, inputs, targets))
            stale.step()
            optimizer.zero_grad()
    trained = [parameter.detach() for parameter in accelerator.unwrap_model(model).parameters()]
    return trained, stale.report.bytes_sent


def test_the_engines_rotating_server_sends_the_bytes_of_the_lesson(worker_pool: WorkerPool) -> None:
    steps, world = 8, lesson("world")
    results = worker_pool.run(late_gradients_by_engine, 4, steps)
    for trained, _ in results:
        assert_close(trained, world.train_alone(steps))
    # Its messages also say which of the 6 parameters have a gradient, and two numbers of each rank; and one round
    # more says that all have ended.
    message = 4 * (484 + 6 + 2 * 4)
    assert sum(sent for _, sent in results) == (steps + 1) * 2 * 3 * message


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


@pytest.mark.parametrize(("name", "engine"), [("gpipe", "gpipe"), ("one_f_one_b", "1f1b")])
def test_the_engine_runs_the_orders_of_the_lesson(name: str, engine: str) -> None:
    schedules = lesson("pipeline_schedules")
    theirs = [[(a.kind, a.micro_batch) for a in actions] for actions in action_lists(engine, 4, 8)]
    assert [getattr(schedules, name)(stage, 4, 8) for stage in range(4)] == theirs


def test_the_engines_zero_bubble_is_as_long_idle_and_keeps_as_much_as_that_of_the_lesson() -> None:
    schedules, timeline = lesson("pipeline_schedules"), simulate(action_lists("zero_bubble", 4, 8))
    assert timeline.idle(0) == schedules.idle_time(schedules.zero_bubble, 4, 8) == 3
    assert max(timeline.in_flight(rank) for rank in range(4)) == 4


class Deep(nn.Module):
    """The lesson's model, with the loss in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = lesson("pipeline").deep_model()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return F.mse_loss(inputs, targets)


def pipeline_by_engine(schedule: str) -> tuple[list[Tensor], float]:
    """On rank 0 the gradients of the whole model, as what a step with a learning rate of 1 changes; bytes sent."""
    accelerator = Accelerator(cpu=True, parallel=f"pp=4 schedule={schedule} micro_batches=8 verify=off")
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


def pipeline_from_scratch(name: str) -> list[Tensor]:
    """The gradients of this process's layers."""
    dist.init_process_group("gloo")
    pipeline = lesson("pipeline")
    stage = pipeline.run_schedule(getattr(pipeline, name))
    return [parameter.grad for parameter in stage.parameters]


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("one_f_one_b", "1f1b"),
        pytest.param("zero_bubble", "zero_bubble", marks=needs_exact_split_backward),
    ],
)
def test_the_engines_pipeline_has_the_gradients_of_the_lesson(
    worker_pool: WorkerPool, name: str, engine: str
) -> None:
    parts = worker_pool.run(pipeline_from_scratch, 4, name)
    expected = [gradient for part in parts for gradient in part]
    results = worker_pool.run(pipeline_by_engine, 4, engine)
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


def ring_attention_by_both() -> None:
    dist.init_process_group("gloo")
    module, rank, size = lesson("ring_attention"), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 64, 8) for _ in range(3)]
    layout = SequenceLayout(dist.group.WORLD, size, rank, head_tail=True)

    def run(chunks: list[Tensor], attention: Any) -> tuple[list[Tensor], float]:
        chunks = [chunk.clone().requires_grad_() for chunk in chunks]
        with CommCounter() as counter:
            out = attention(*chunks)
            out.square().sum().backward()
        return [out.detach(), *(chunk.grad for chunk in chunks)], counter.wire_bytes()

    # The lesson's processes have chunks in order, the engine's have one early and one late.
    ours, sent = run([tensor.chunk(size, dim=2)[rank] for tensor in whole], module.RingAttention.apply)
    theirs, sent_by_engine = run(
        [layout.local(tensor, 2) for tensor in whole], lambda *qkv: ring_attention(*qkv, layout, causal=True)
    )
    in_order = [layout.gather(tensor, 2).chunk(size, dim=2)[rank] for tensor in theirs]
    assert_close(ours, in_order, within=1e-5)
    pair = 2 * ours[0].nbytes
    assert sent == (3 * size - 2) * pair
    # It spares the last hop of the gradients.
    assert sent_by_engine == (3 * size - 3) * pair


def test_the_engines_ring_attention_is_that_of_the_lesson(worker_pool: WorkerPool) -> None:
    worker_pool.run(ring_attention_by_both, 4)


def experts_by_both() -> None:
    dist.init_process_group("gloo")
    module, rank, size = lesson("expert_parallel"), dist.get_rank(), dist.get_world_size()
    plain = module.PlainMixture()
    engine = MixtureOfExperts(module.WIDTH, 4 * module.WIDTH, module.EXPERTS, top_k=1)
    with torch.no_grad():
        engine.router.weight.copy_(plain.router.weight)
        for number, (up, _, down) in enumerate(plain.experts):
            engine.experts.weight_in[number], engine.experts.bias_in[number] = up.weight, up.bias
            engine.experts.weight_out[number], engine.experts.bias_out[number] = down.weight, down.bias
    expert_parallel(engine, dist.init_device_mesh("cpu", (size,)))
    tokens, sent = torch.randn(32, module.WIDTH, generator=torch.Generator().manual_seed(rank)), []
    scratch = module.ExpertParallelMixture(plain)
    results = []
    for layer in (scratch, engine):
        given = tokens.clone().requires_grad_()
        with CommCounter() as counter:
            outputs = layer(given)
            outputs.square().sum().backward()
        results.append([outputs, given.grad])
        sent.append(counter)
    assert_close(*results)
    # All-to-alls count as even ones in the counter: all rows, of which 1 / N stay. Two in forward, two in backward.
    arriving = sum(record.payload_bytes for record in sent[1].records if record.operation == "all_to_all")
    counts = (size - 1) * module.EXPERTS * 8
    rows = (sent[0].wire_bytes() - counts) / 4 / module.WIDTH
    assert rows == 2 * scratch.rows_travelling
    assert arriving == 2 * 4 * module.WIDTH * (scratch.rows_travelling + 2 * scratch.rows_staying)


def test_the_engines_experts_are_those_of_the_lesson(worker_pool: WorkerPool) -> None:
    worker_pool.run(experts_by_both, 4)


def checkpointing_by_both(parallel: str) -> None:
    """On one process with the lesson's gradients; on several, with the bytes of each rank's rows."""
    module = lesson("gradient_checkpointing")
    inputs = torch.randn(32, module.WIDTH, generator=torch.Generator().manual_seed(2))
    expected, kept_by_lesson, calls = module.gradients("full" in parallel, inputs)
    accelerator = Accelerator(cpu=True, parallel=parallel)
    plain = module.Model(checkpointing=False)
    model, _ = accelerator.prepare(plain, torch.optim.SGD(plain.parameters()))
    rows = inputs.chunk(accelerator.num_processes)[accelerator.process_index]
    torch.manual_seed(1)
    with module.kept_bytes(model) as kept:
        outputs = model(rows)
    accelerator.backward(outputs.square().mean())
    a_block = 1 if "full" in parallel else 10  # as on the lesson's page
    assert kept_by_lesson == module.BLOCKS * a_block * inputs.nbytes
    assert sum(kept.values()) == module.BLOCKS * a_block * rows.nbytes
    assert sum(block.calls for block in plain.blocks) == calls
    if accelerator.num_processes == 1:
        assert_close([parameter.grad for parameter in model.parameters()], expected, within=0)


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [(1, "activation=none"), (1, "activation=full"), (2, "activation=full"), (2, "zero=3 activation=full")],
)
def test_the_engines_checkpointing_has_the_gradients_and_keeps_the_bytes_of_the_lesson(
    worker_pool: WorkerPool, processes: int, parallel: str
) -> None:
    worker_pool.run(checkpointing_by_both, processes, parallel)


def kept_in_float16(rows: int) -> int:
    """What layers of 8, 16, 16 and 4 keep in float16, and the loss in float32: the formula of the lesson's table."""
    return 2 * (rows * (8 + 16 + 16) + 16 * 16 + 16 * 4) + 4 * 2 * rows * 4


def loss_scale_by_engine(
    steps: int, tiny: float, start: float, grow_every: int
) -> tuple[list[Tensor], list[tuple[float, bool]], int, float]:
    """After training in float16: parameters, the scales of the steps and which were skipped, bytes kept and sent."""
    world = lesson("world")
    scaler = GradScalerKwargs(init_scale=start, growth_interval=grow_every)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[scaler])
    rank, size = accelerator.process_index, accelerator.num_processes
    plain = world.small_model()
    model, optimizer = accelerator.prepare(plain, world.sgd(plain.parameters(), lr=0.1 / tiny))
    scales = []
    for step in range(steps):
        inputs, targets = (world.share(tensor, rank, size) for tensor in world.batch(step))
        with lesson("gradient_checkpointing").kept_bytes(model) as kept:
            loss = tiny * world.mean_loss(model, inputs, targets)
        scale = accelerator.scaler.get_scale()
        with CommCounter() as counter:
            accelerator.backward(loss)
            optimizer.step()
        scales.append((scale, accelerator.optimizer_step_was_skipped))
        optimizer.zero_grad()
    trained = [parameter.detach() for parameter in accelerator.unwrap_model(model).parameters()]
    return trained, scales, sum(kept.values()), counter.wire_bytes()


def loss_scale_from_scratch(steps: int) -> tuple[list[Tensor], list[tuple[float, bool]], int, float]:
    dist.init_process_group("gloo")
    module, world = lesson("loss_scaling"), lesson("world")
    with CommCounter() as counter:
        trained, scale = module.train(steps)
    with lesson("gradient_checkpointing").kept_bytes(model := world.small_model()) as kept:
        module.half_loss(model, *(world.share(tensor, 0, dist.get_world_size()) for tensor in world.batch(0)))
    return trained, scale.steps, sum(kept.values()), counter.wire_bytes() / steps


@pytest.mark.parametrize("processes", [2, again(4)])
def test_the_engines_loss_scale_goes_the_way_of_the_lesson(worker_pool: WorkerPool, processes: int) -> None:
    # In steps 1, 2, 4, 8 and 16 the engine's ranks compare their copies.
    module, world, steps = lesson("loss_scaling"), lesson("world"), 15
    scale = module.LossScale()
    # The engine divides gradients by N after backward, the lesson before: its scale is N times the engine's.
    arguments = (steps, module.TINY, scale.value / processes, scale.grow_every)
    engine = worker_pool.run(loss_scale_by_engine, processes, *arguments)
    scratch = worker_pool.run(loss_scale_from_scratch, processes, steps)
    formula = 2 * (processes - 1) / processes * 4 * 484
    for (trained, scales, kept, sent), (expected, expected_scales, kept_by_lesson, sent_by_lesson) in zip(
        engine, scratch, strict=True
    ):
        assert [(processes * value, skipped) for value, skipped in scales] == expected_scales
        assert {skipped for _, skipped in scales} == {True, False}
        assert_close(trained, expected, within=1e-5)
        assert kept == kept_by_lesson == kept_in_float16(world.ROWS // processes)
        assert sent_by_lesson == formula <= sent <= formula + 300


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
