"""Which worlds can be divided as ``parallel`` says: the mesh's own arithmetic, by trying every division."""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.compat.deepspeed import from_deepspeed
from lockstep.config import BatchSizes, SettingValue, axes_of, fitted
from lockstep.errors import ConfigError
from lockstep.launch import Program, make_plan, merge
from lockstep.utils import Parallel
from tests.marks import examples
from tests.refusals import expect_refusal

WORDS = st.fixed_dictionaries(
    {},
    optional={
        "tp": st.integers(1, 4),
        "pp": st.integers(1, 4),
        "cp": st.integers(1, 4),
        "ep": st.integers(1, 4),
        "zero": st.integers(0, 3),
        "replicate": st.integers(1, 4),
        "hpz": st.integers(0, 4),
    },
)


def can_be_divided(parallel: Parallel, world: int) -> bool:
    """Whether a grid pp x replicate x shard x cp x tp of whole sizes has ``world`` ranks."""
    if world == 1:
        return parallel.pp * parallel.cp * parallel.tp * parallel.ep == 1
    for shard in range(1, world + 1):
        if parallel.pp * parallel.replicate * shard * parallel.cp * parallel.tp != world:
            continue
        sharing = shard * parallel.cp
        if parallel.replicate > 1 and sharing == 1:
            continue  # nothing is sharded
        if parallel.hpz and (sharing % parallel.hpz or not 1 < parallel.hpz < sharing):
            continue
        if (parallel.replicate * shard) % parallel.ep:
            continue
        return True
    return False


@examples(200)
@given(words=WORDS, world=st.integers(1, 24))
def test_a_world_is_accepted_exactly_when_a_grid_has_its_ranks(words: dict[str, int], world: int) -> None:
    try:
        parallel = Parallel(**words)
    except ConfigError:
        return  # the words exclude each other, whatever the world
    possible = can_be_divided(parallel, world)
    if not possible:
        with pytest.raises(ConfigError, match=r"parallel='.*\d.*\. \w.*\."):
            fitted(parallel, BatchSizes(), world)
        return
    fitted(parallel, BatchSizes(), world)
    axes = axes_of(parallel, world)
    assert axes.pp * axes.replicate * axes.shard * axes.cp * axes.tp == world


# words, processes of a machine, machines (least, most) -> refused
LAUNCHES = [
    ("pp=2", 3, (1, 1), "3 / 2 is not whole"),
    ("tp=2", 3, (1, 1), "3 / 2 is not whole"),
    ("cp=4", 6, (1, 1), "6 / 4 is not whole"),
    ("pp=2 tp=2", 2, (1, 1), "2 / 4 is not whole"),
    ("tp=2 pp=2 cp=2", 6, (2, 2), "12 / 8 is not whole"),
    ("ep=2", 3, (1, 1), "3 / 2 is not whole"),
    ("ep=4", 1, (2, 2), "2 / 4 is not whole"),
    ("zero=3 replicate=2", 3, (1, 1), "3 / 2 is not whole"),
    ("zero=3 replicate=2", 2, (1, 1), "nothing is sharded"),
    ("zero=3 replicate=2 tp=2", 2, (1, 1), "1 / 2 is not whole"),
    ("zero=3 hpz=2", 2, (1, 1), "hpz=2 must divide the 2 ranks"),
    ("zero=3 cp=2 replicate=4", 2, (2, 2), "cp=2"),
    ("offload=params", 2, (1, 1), "offloads whole parameters"),
    ("dataparallel", 2, (1, 1), "is for one process, but 2 were started"),
    ("tp=2", 1, (1, 4), "1 / 2 is not whole"),  # with one machine of one to four
    ("pp=4", 2, (2, 3), "6 / 4 is not whole"),  # with three of two to three
    ("pp=2 stages_per_rank=2", 2, (1, 1), "schedule=1f1b has one stage on each rank"),
    ("pp=2 schedule=zbv stages_per_rank=3", 2, (1, 1), "folds the stages into a V"),
    ("pp=2 split=a,b", 2, (1, 1), "split names 2 blocks, but 2 stages"),
    ("pp=2", 4, (1, 1), None),
    ("tp=2 pp=2 cp=2", 4, (2, 2), None),
    ("tp=2", 2, (1, 4), None),
    ("zero=3 replicate=2", 2, (2, 2), None),
    ("zero=3 replicate=2", 1, (1, 1), None),  # one process runs what only shards
    ("pp=2 schedule=interleaved split=a,b,c", 2, (1, 1), None),
]


def plan(line: str, nproc: int, machines: tuple[int, int], **more: SettingValue) -> None:
    flags = {
        "parallel": SettingValue(line, "flag --parallel"),
        "nproc": SettingValue(nproc, "flag --nproc"),
        "num_machines": SettingValue(machines[1], "flag --nnodes"),
        "min_machines": SettingValue(machines[0], "flag --nnodes"),
        "main_process_ip": SettingValue("10.0.0.1", "flag --rdzv"),
        "main_process_port": SettingValue(29500, "flag --rdzv"),
        **more,
    }
    make_plan(Program("true", no_python=True), merge(flags, {}, {}), device_count=0, cores=8)


@pytest.mark.parametrize(("line", "nproc", "machines", "refused"), LAUNCHES)
def test_a_launch_refuses_what_its_workers_would(
    line: str, nproc: int, machines: tuple[int, int], refused: str | None
) -> None:
    if refused is None:
        plan(line, nproc, machines)
        return
    expect_refusal(ConfigError, refused, plan, line, nproc, machines)


@pytest.mark.parametrize(
    "backend", [{"hosts": "a,b"}, {"slurm": True}, {"mpi": True}, {"ray": True}, {"k8s": "jobset"}]
)
def test_every_way_of_launching_refuses_it(backend: dict[str, object]) -> None:
    flags = {name: SettingValue(value, f"flag --{name}") for name, value in backend.items()}
    if "k8s" in backend:
        flags["k8s_options"] = SettingValue({"image": "a"}, "flag --k8s-option")
    flags |= {
        "parallel": SettingValue("pp=4", "flag --parallel"),
        "nproc": SettingValue(3, "flag --nproc"),
        "num_machines": SettingValue(2, "flag --nnodes"),
    }
    with pytest.raises(ConfigError, match="6 / 4"):
        make_plan(Program("true", no_python=True), merge(flags, {}, {}), device_count=0, cores=8)


def test_rows_are_counted_over_the_ranks_that_have_batches_of_their_own() -> None:
    """Four processes with tp=2 are two that read: 16 rows are 2 x 4 x 2."""
    batch = BatchSizes(train=16, micro=4)
    assert fitted(Parallel(), batch, 4).accumulation == 1
    for axis, zero in itertools.product(("tp", "pp", "cp"), (0, 1)):
        assert fitted(Parallel(**{axis: 2}, zero=zero), batch, 4).accumulation == 2


@pytest.mark.parametrize(("rows", "fits"), [(12, False), (16, True)])
def test_a_launch_counts_rows_as_its_workers_do(tmp_path: Path, rows: int, fits: bool) -> None:
    path = tmp_path / "ds.json"
    config = {"train_micro_batch_size_per_gpu": 4, "tensor_parallel": {"autotp_size": 2}}
    path.write_text(json.dumps({"train_batch_size": rows, **config}))
    settings = merge({"nproc": SettingValue(4, "flag --nproc")}, {}, {})
    with nullcontext() if fits else pytest.raises(ConfigError, match="= 8"):
        make_plan(Program("true", no_python=True), settings, 0, 8, described=from_deepspeed(path).settings)
