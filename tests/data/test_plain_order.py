"""A loop over a prepared loader is the plain loop: the same samples and random numbers, bit for bit. Oracle: torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lockstep import Accelerator
from lockstep.data_loader import PreparedLoader
from lockstep.errors import CheckpointError, UsageError
from lockstep.runtime import StepState, end_runtime, start_runtime
from lockstep.utils import set_seed
from tests.data.helpers import Numbers, prepare, rows_of, shuffled
from tests.data.test_dispatch import prepare as prepare_on_ranks
from tests.refusals import expect_refusal


def seed_all(seed: int = 0) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def generators() -> tuple[Any, ...]:
    """The states of the global generators, comparable."""
    _, words, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), words.tolist(), rest  # type: ignore[union-attr]


def set_generators(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(torch.tensor(states[0], dtype=torch.uint8))
    random.setstate(states[1])
    np.random.set_state(("MT19937", np.array(states[2], dtype=np.uint32), *states[3]))


class Noisy(Dataset[Any]):
    """A row [index, a number of each global generator]."""

    def __init__(self, n: int = 22) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> torch.Tensor:
        first = index[0] if isinstance(index, list) else index
        return torch.tensor([first / 32, torch.rand(()).item(), random.random(), np.random.rand()])


class OwnNoise(Noisy):
    """Draws from a generator of its own as well, of which each worker process has a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = generator()

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(index) + torch.rand(4, generator=self.generator)


class ManyNoisy(Noisy):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class OneByOne(Sampler[int]):
    """Draws each index when it is asked for."""

    def __init__(self, draw: Callable[[int], int], n: int = 22) -> None:
        self.draw, self.n = draw, n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        pool = list(range(self.n))
        while pool:
            yield pool.pop(self.draw(len(pool)))


class AtOnce(OneByOne):
    """Draws in ``iter``, before torch's loader seeds its workers."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(self.n).tolist())


class ShuffledBatches:
    def __init__(self) -> None:
        self.batches = [list(range(i, min(22, i + 4))) for i in range(0, 22, 4)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.batches)
        random.shuffle(order)
        torch.rand(1)
        return iter(order)


class WithoutLength(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(22).tolist())


class Buffered(IterableDataset[Any]):
    """A stream with a buffer that shuffles it by ``draw``; worker processes take every n-th."""

    def __init__(self, draw: Callable[[int], int], generator: torch.Generator | None = None) -> None:
        self.draw = draw
        self.generator = generator

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        buffer: list[int] = []
        for number in range(first, 22, step):
            buffer.append(number)
            if len(buffer) == 5:
                yield self.row(buffer.pop(self.pick(5)))
        while buffer:
            yield self.row(buffer.pop(self.pick(len(buffer))))

    def pick(self, n: int) -> int:
        return self.draw(n) if self.generator is None else int(torch.randint(n, (), generator=self.generator))

    def row(self, number: int) -> torch.Tensor:
        return torch.tensor([number / 32, random.random(), float(np.random.rand()), 0.0])


class ShuffledFirst(Buffered):
    def __iter__(self) -> Iterator[torch.Tensor]:
        rows = list(range(22))
        random.shuffle(rows)
        return map(self.row, rows)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def by_torch(n: int) -> int:
    return int(torch.randint(n, ()))


def by_numpy(n: int) -> int:
    return int(np.random.randint(n))


def noisy_collate(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(
        [torch.stack(rows), torch.tensor([[0.0, random.random(), float(np.random.rand()), 0.0]])]
    )


def sampled(make: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., DataLoader[Any]]:
    return lambda **w: DataLoader(Noisy(), 4, sampler=make(*args, **options), **w)


def random_sampler(own: bool = False, **options: Any) -> Callable[..., DataLoader[Any]]:
    return lambda **w: DataLoader(
        Noisy(), 4, sampler=RandomSampler(Noisy(), generator=generator() if own else None, **options), **w
    )


MAPS: dict[str, Callable[..., DataLoader[Any]]] = {
    "in sequence": lambda **w: DataLoader(Noisy(), 4, **w),
    "shuffled": lambda **w: DataLoader(Noisy(), 4, shuffle=True, **w),
    "last batch full": lambda **w: DataLoader(Noisy(24), 4, shuffle=True, **w),
    "drop last": lambda **w: DataLoader(Noisy(), 4, shuffle=True, drop_last=True, **w),
    "generator": lambda **w: DataLoader(Noisy(), 4, shuffle=True, generator=generator(), **w),
    "generator, full": lambda **w: DataLoader(Noisy(24), 4, shuffle=True, generator=generator(), **w),
    "generator of the loader alone": lambda **w: DataLoader(Noisy(), 4, generator=generator(), **w),
    "replacement": random_sampler(replacement=True, num_samples=70),
    "replacement, generator": random_sampler(own=True, replacement=True, num_samples=70),
    "more than the data": random_sampler(num_samples=50),
    "more than the data, generator": random_sampler(own=True, num_samples=50),
    "weighted": sampled(WeightedRandomSampler, torch.arange(1.0, 23.0), 22),
    "subset": sampled(SubsetRandomSampler, list(range(3, 20))),
    "one by one, torch": sampled(OneByOne, by_torch),
    "one by one, python": sampled(OneByOne, random.randrange),
    "at once, numpy": sampled(AtOnce, by_numpy),
    "without length": sampled(WithoutLength),
    "batch sampler": lambda **w: DataLoader(
        Noisy(), batch_sampler=BatchSampler(RandomSampler(Noisy()), 3, True), **w
    ),
    "own batch sampler": lambda **w: DataLoader(Noisy(), batch_sampler=ShuffledBatches(), **w),
    "single items": lambda **w: DataLoader(Noisy(), batch_size=None, shuffle=True, **w),
    "dataset with a generator": lambda **w: DataLoader(OwnNoise(), 4, shuffle=True, **w),
    "many at once, collate draws": lambda **w: DataLoader(ManyNoisy(), 4, collate_fn=noisy_collate, **w),
    "batches as items": lambda **w: DataLoader(
        Noisy(), batch_size=None, sampler=BatchSampler(RandomSampler(Noisy()), 4, False), **w
    ),
}
STREAMS: dict[str, Callable[..., DataLoader[Any]]] = {
    "stream, python": lambda **w: DataLoader(Buffered(random.randrange), 4, **w),
    "stream, numpy": lambda **w: DataLoader(Buffered(by_numpy), 4, drop_last=True, **w),
    "stream, own generator": lambda **w: DataLoader(Buffered(by_numpy, generator()), 4, **w),
    "stream, shuffled first": lambda **w: DataLoader(ShuffledFirst(by_numpy), 4, generator=generator(), **w),
    "stream, collate draws": lambda **w: DataLoader(
        Buffered(random.randrange), 4, collate_fn=noisy_collate, **w
    ),
}
LOADERS = MAPS | STREAMS
WORKERS = [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


def trained(loader: DataLoader[Any], epochs: int = 4, saves: list[Any] | None = None) -> list[Any]:
    """Train with dropout, and break off the second epoch: batches, generators after each of them, and parameters.

    ``saves`` gets the model, the position and the generators after each step. An epoch that was begun is ended.
    """
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 1))
    return continued(loader, model, 0, epochs, saves)


def continued(
    loader: DataLoader[Any], model: nn.Module, epoch: int, epochs: int, saves: list[Any] | None = None
) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    log: list[Any] = []
    while epoch < epochs:
        for number, batch in enumerate(loader):
            log.append((batch.tolist(), generators()))
            loss = model(batch.reshape(-1, 4)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if saves is not None:
                weights = {name: value.clone() for name, value in model.state_dict().items()}
                saves.append((epoch, weights, loader.state_dict(), generators()))  # type: ignore[attr-defined]
            elif epoch == 1 and number == 2 and epochs == 4:
                break
        epoch += 1
        log.append(generators())
    log.append([value.tolist() for value in model.parameters()])
    return log


@pytest.mark.parametrize("name", LOADERS)
def test_a_prepared_loader_gives_the_samples_and_random_numbers_of_the_plain_one(name):
    seed_all()
    expected = trained(LOADERS[name]())
    seed_all()
    assert trained(prepare(LOADERS[name]())) == expected


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("generator", WORKERS[0]),
        ("own batch sampler", WORKERS[1]),
        ("batches as items", WORKERS[0]),
        ("stream, numpy", WORKERS[0]),
    ],
)
def test_with_workers_order_and_generators_are_those_of_the_plain_loader(name, workers):
    def make() -> DataLoader[Any]:
        return drawing_nothing(name, **workers)

    seed_all()
    expected = [(batch.tolist(), generators()) for loader in [make()] for _ in range(3) for batch in loader]
    seed_all()
    assert [
        (batch.tolist(), generators()) for loader in [prepare(make())] for _ in range(3) for batch in loader
    ] == expected


def worker_noise(worker_id: int) -> None:
    worker = get_worker_info()
    assert worker is not None
    worker.dataset.n += worker.seed % 1000 + worker_id  # type: ignore[attr-defined]
    np.random.seed(worker_id)


class Sized(Noisy):
    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor(index + self.n)


def test_worker_init_fn_sees_what_torch_gives_it():
    def make() -> DataLoader[Any]:
        return DataLoader(Sized(), 4, shuffle=True, num_workers=2, worker_init_fn=worker_noise)

    seed_all()
    expected = [batch.tolist() for _ in range(2) for batch in make()]
    seed_all()
    loader = prepare(make())
    assert [batch.tolist() for _ in range(2) for batch in loader] == expected


def interleaved(first: Any, second: Any) -> list[Any]:
    log: list[Any] = []
    for _ in range(2):
        for one, other in zip(first, second, strict=False):
            log += [one.tolist(), other.tolist(), torch.rand(1).item()]
        log.append(next(iter(first)).tolist())
        waiting = iter(second)
        torch.rand(1)
        log += [next(waiting).tolist(), len(first)]
    return [*log, generators()]


@pytest.mark.parametrize("name", ["shuffled", "own batch sampler", "stream, python"])
def test_several_loaders_in_one_loop_and_peeks_draw_as_plain_ones(name):
    if name in STREAMS:
        seed_all()
        expected = [next(iter(STREAMS[name]())).tolist() for _ in range(2)]
        seed_all()
        assert [next(iter(prepare(STREAMS[name]()))).tolist() for _ in range(2)] == expected
        return
    seed_all()
    plain = interleaved(MAPS[name](), MAPS["weighted"]())
    seed_all()
    assert interleaved(prepare(MAPS[name]()), prepare(MAPS["weighted"]())) == plain


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("shuffled", {}),
        ("generator", {"use_seedable_sampler": True}),
        ("more than the data", {"use_seedable_sampler": True, "data_seed": 9}),
        ("weighted", {}),
        ("weighted", {"use_seedable_sampler": True, "data_seed": 9}),
    ],
)
def test_order_and_generators_are_those_of_accelerates_loader(name, options):
    from accelerate.data_loader import prepare_data_loader

    def log(loader: Any) -> list[Any]:
        return [
            entry
            for _ in range(3)
            for batch in loader
            for entry in (batch[:, 0].tolist(), torch.rand(1).item())
        ]

    def make() -> DataLoader[Any]:
        return drawing_nothing(name)  # Accelerate reads a batch ahead

    seed_all(3)
    expected = log(prepare_data_loader(make(), num_processes=1, process_index=0, **options))
    seed_all(3)
    assert log(prepare(make(), **options)) == expected


class Quiet(Noisy):
    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor(index, dtype=torch.float32).reshape(-1)


def test_a_seedable_sampler_is_a_function_of_seed_and_epoch():
    def epochs(options: dict[str, Any], seed: int) -> list[list[int]]:
        seed_all(seed)
        loader = prepare(DataLoader(Numbers(12), 12, shuffle=True), use_seedable_sampler=True, **options)
        return [rows_of(batch) for _ in range(3) for batch in loader]

    assert epochs({}, 7) == [shuffled(12, 7 + epoch) for epoch in range(3)]
    assert epochs({"data_seed": 4}, 7) == [shuffled(12, 4 + epoch) for epoch in range(3)]


# -- continued runs -----------------------------------------------------------------------------------


def check_continued(make: Callable[[], PreparedLoader], stops: Callable[[int], list[int]]) -> None:
    seed_all()
    saves: list[Any] = []
    whole = trained(make(), 3, saves)
    steps = [i for i, entry in enumerate(whole) if len(entry) == 2]
    for stop in stops(len(saves)):
        seed_all(1000 + stop)
        loader, model = make(), nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 1))
        epoch, weights, position, states = saves[stop]
        model.load_state_dict(weights)
        loader.load_state_dict(position)
        set_generators(states)
        # Saved at its last batch, an epoch is over, but for what the plain loop draws at its end.
        epoch = loader.epoch if loader.epoch != epoch + 1 else epoch + 1
        assert continued(loader, model, epoch, 3)[-1] == whole[-1], stop
        assert len(steps) == len(saves)


@pytest.mark.parametrize("name", [name for name in LOADERS if "one by one" not in name])
def test_a_continued_run_is_the_undisturbed_one_bit_for_bit(name):
    check_continued(lambda: prepare(LOADERS[name]()), lambda count: [0, 1, count // 2, count - 2])


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("generator", WORKERS[0]),
        ("single items", WORKERS[0]),
        ("own batch sampler", WORKERS[1]),
        ("dataset with a generator", WORKERS[1]),
        ("many at once, collate draws", WORKERS[0]),
        ("stream, collate draws", WORKERS[0]),
        ("stream, python", WORKERS[0]),
        ("stream, own generator", WORKERS[1]),
    ],
)
def test_a_continued_run_with_workers_is_the_undisturbed_one(name, workers):
    check_continued(lambda: prepare(LOADERS[name](**workers)), lambda count: [1, count // 2])


def test_a_sampler_that_draws_where_the_loop_draws_cannot_be_continued_and_says_so():
    loader = prepare(MAPS["one by one, torch"]())
    seed_all()
    running = iter(loader)
    for _ in range(3):
        next(running)
        torch.rand(1)
    other = prepare(MAPS["one by one, torch"]())
    other.load_state_dict(loader.state_dict())
    expect_refusal(CheckpointError, "12 samples", lambda: next(iter(other)))


def in_steps(loader: PreparedLoader) -> list[Any]:
    """Rows of each batch of a loop with dropout, and the state of the loader and of the generators behind it."""
    found = []
    for batch in loader:
        torch.nn.functional.dropout(batch)
        found.append((batch[:, 0].tolist(), loader.state_dict(), generators()))
    return found


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [
        ("one by one, torch", 0, 0),
        ("one by one, torch", 2, 2),
        ("one by one, python", 2, 2),
        ("one by one, python", 2, 0),
        ("at once, numpy", 0, 2),
    ],
)
def test_samples_that_workers_had_ahead_come_again_or_nothing_does(name, before, now):
    seed_all()
    saved = in_steps(prepare(MAPS[name](num_workers=before)))
    for step in (1, 2, 4):
        _, state, states = saved[step - 1]
        other = prepare(MAPS[name](num_workers=now))
        other.load_state_dict(state)
        set_generators(states)
        # Samples that are drawn one by one are drawn again only where as many are ahead, and nobody else draws.
        is_alone = name == "at once, numpy" or (name == "one by one, python" and before == now == 2)
        if is_alone or (before == now == 0 and step == 1):
            assert [rows for rows, *_ in in_steps(other)] == [rows for rows, *_ in saved[step:]], step
            continue
        words = "samples again" if before == now == 0 else "samples ahead|samples again"
        with pytest.raises(CheckpointError, match=words):
            next(iter(other))


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_position_of_an_earlier_version_continues_in_the_order_of_its_seed(epochs):
    """Which is a function of seed and epoch: torch.randperm under seed + epoch."""
    state = {
        "epoch": epochs, "seed": 11, "samples": [4], "base": [0], "rounds": [2], "turn": 0, "inner": None,
        "kind": "map", "world_size": 1, "batch_size": 2, "split_batches": False, "even_batches": True,
        "drop_last": False, "num_workers": 0, "dataset_size": 12,
    }  # fmt: skip
    loader = prepare(DataLoader(Numbers(12), 2, shuffle=True))
    loader.load_state_dict(state)
    rest = [row for batch in loader for row in rows_of(batch)]
    following = [row for batch in loader for row in rows_of(batch)]
    assert rest == shuffled(12, 11 + epochs)[4:]
    assert following == shuffled(12, 12 + epochs)


def test_with_a_data_seed_only_the_epoch_that_was_begun_goes_on_in_its_drawn_order():
    seed_all()
    plain = [row for batch in DataLoader(Numbers(12), 2, shuffle=True) for row in rows_of(batch)]
    seed_all()
    loader = prepare(DataLoader(Numbers(12), 2, shuffle=True))
    next(iter(loader))
    other = prepare(DataLoader(Numbers(12), 2, shuffle=True), data_seed=4)
    other.load_state_dict(loader.state_dict())
    assert [row for batch in other for row in rows_of(batch)] == plain[2:]
    assert [row for batch in other for row in rows_of(batch)] == shuffled(12, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(draws=3), "'draws'"),
        (lambda s: s["draws"].update(digest="1"), "'digest'"),
        (lambda s: s["draws"]["now"].update(own=[torch.Generator().get_state()]), "contradict each other"),
        (
            lambda s: s["draws"]["start"].update(torch=torch.zeros(3)),
            "random number generators",
        ),
        (lambda s: s["draws"]["start"].pop("python"), "random number generators"),
        (lambda s: s["draws"].update(seedable=True), "use_seedable_sampler=True"),
    ],
)
def test_draws_that_are_none_are_refused_and_change_nothing(change, message):
    loader = prepare(DataLoader(Numbers(8), 2, shuffle=True))
    next(iter(loader))
    state = loader.state_dict()
    change(state)
    other = prepare(DataLoader(Numbers(8), 2, shuffle=True))
    expect_refusal(CheckpointError, message, other.load_state_dict, state)
    assert len(list(other)) == 4


def test_generators_of_another_number_are_refused():
    state = prepare(DataLoader(Numbers(8), 2, shuffle=True, generator=generator())).state_dict()
    with pytest.raises(CheckpointError, match="1 random generators.* 0"):
        prepare(DataLoader(Numbers(8), 2, shuffle=True)).load_state_dict(state)


class WrongLength(AtOnce):
    def __init__(self, said: int) -> None:
        super().__init__(by_numpy)
        self.said = said

    def __len__(self) -> int:
        return self.said


@pytest.mark.parametrize(("said", "given"), [(30, "only 6"), (12, "more than 3")])
def test_a_wrong_length_is_refused_where_gradients_accumulate_up_to_the_last_batch(said, given):
    def make(steps: int) -> PreparedLoader:
        return prepare(
            DataLoader(Noisy(), 4, sampler=WrongLength(said)), step=StepState(accumulation_steps=steps)
        )

    assert len(list(make(1))) == 6
    with pytest.raises(UsageError, match=f"gave {given} batches"):
        list(make(2))


# -- several processes --------------------------------------------------------------------------------


def drawing_nothing(name: str, **options: Any) -> DataLoader[Any]:
    """The loader of this name, over data that draw nothing while they are read."""
    loader = LOADERS[name](**options)
    if name in MAPS:
        loader.dataset.__class__ = Quiet
    return loader


def ranks_part(names: list[str], specific: bool, dispatch: bool | None) -> list[list[list[float]]]:
    runtime = start_runtime(cpu=True)
    parts = []
    for name in names:
        seed_all(runtime.rank if specific else 0)
        loader = prepare_on_ranks(drawing_nothing(name), dispatch_batches=dispatch)
        parts.append([batch[..., 0].tolist() for _ in range(3) for batch in loader])
    end_runtime()
    return parts


ON_RANKS = [
    "in sequence", "shuffled", "generator, full", "weighted", "subset", "more than the data", "own batch sampler",
    "at once, numpy", "stream, python", "stream, own generator",
]  # fmt: skip


@pytest.mark.parametrize(
    ("world", "specific", "dispatch"),
    [
        (2, False, True),
        (2, True, None),
    ],
)
def test_ranks_together_have_the_order_of_one_process(run_distributed, world, specific, dispatch):
    ranks = run_distributed(ranks_part, world, ON_RANKS, specific, dispatch)
    for i, name in enumerate(ON_RANKS):
        seed_all()
        loader = drawing_nothing(name)
        steps = len(ranks[0][i]) // 3
        for epoch in range(3):
            plain = [row for batch in loader for row in batch[..., 0].tolist()]
            these = range(epoch * steps, (epoch + 1) * steps)
            rows = [row for step in these for rank in ranks for row in rank[i][step]]
            assert rows[: len(plain)] == plain, (name, epoch)


class Own(torch.utils.data.Sampler[int]):
    """Draws from a generator of its own that the loader does not know."""

    def __iter__(self) -> Any:
        yield from torch.randperm(8, generator=torch.Generator().manual_seed(1)).tolist()

    def __len__(self) -> int:
        return 8


def drawn_behind_a_loader(prepared: bool) -> list[float]:
    """What processes that were seeded for themselves draw while they read batches."""
    accelerator = Accelerator(cpu=True)
    set_seed(3, device_specific=True)
    loader: Any = torch.utils.data.DataLoader(range(8), batch_size=2, sampler=Own())
    if prepared:
        loader = accelerator.prepare(loader)
    found = []
    for _ in range(2):
        for _ in loader:
            found.append(torch.rand(1).item())
            break
    return found


def test_processes_seeded_for_themselves_draw_on_as_behind_a_plain_loader(run_distributed) -> None:
    plain = run_distributed(drawn_behind_a_loader, 2, False)
    assert run_distributed(drawn_behind_a_loader, 2, True) == plain
    assert plain[0] != plain[1]
