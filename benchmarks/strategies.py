"""Step time of each strategy on two processes, through shared memory and through gloo, over no communication at all.

    python benchmarks/strategies.py
    python benchmarks/strategies.py --quick

The model is the demo's GPT with 3.2 million parameters. Each contender has two processes of its own, and they take
turns in blocks of steps, forwards and backwards; a ratio compares two blocks of one round. "no communication" trains
a whole model in each of the two processes. tp, pp and cp divide one batch among the ranks, and are compared with gloo.
The losses of all contenders on whole batches must agree, or the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import common

RANKS = 2
WARM_UP = 6
UNTIMED = 2  # steps at the beginning of a block, while caches still hold another model
ALONE, BARE = "no communication", "bare DDP, gloo"
WORDS = ("ddp", "zero=1", "zero=2", "zero=3", "tp=2", "pp=2", "cp=2")
BACKENDS = {"": "shm", ", gloo": "gloo"}
AIMS = {"ddp": (1.05, 0.92), "zero=1": (1.10, None), "zero=2": (1.10, None), "zero=3": (1.15, None)}
"""Of a step over no communication, and over bare DDP on gloo."""
OVER_GLOO = 0.7
LOSS_TOLERANCE = 2e-5  # relative


def names() -> list[str]:
    deepspeed = [f"deepspeed, stage {stage}" for stage in (1, 2, 3)] if find_spec("deepspeed") else []
    ours = [word + backend for word in WORDS for backend in BACKENDS]
    return [ALONE, BARE, *ours, *deepspeed]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=256, help="features of a token (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="blocks (default %(default)s)")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    return common.parse_for_blocks(parser, "strategies", rounds=9, quick_rounds=2)


# In a process of a contender -----------------------------------------------------------------------------------


def steps_of(chosen: argparse.Namespace) -> Iterator[Any]:
    """An endless loop of training steps, each of which gives its loss."""
    import torch
    import torch.distributed as dist

    from contenders import loss_of
    from zero_contenders import TUNED, ZeroTask, ddp, deepspeed

    torch.set_num_threads(1)
    rank, name = int(os.environ["RANK"]), chosen.contender
    task = ZeroTask(stage=0, width=chosen.width, layers=chosen.layers, fused=True)
    if name in (ALONE, BARE) or name.startswith("deepspeed"):
        dist.init_process_group("gloo")
        if name == BARE:
            return ddp(task, rank, RANKS)
        if name != ALONE:
            stage = int(name[-1])
            return deepspeed(replace(task, stage=stage), rank, RANKS, **TUNED[stage])
        model = task.model()
        optimizer, backward = task.optimizer(model), torch.Tensor.backward
    else:
        from lockstep import Accelerator

        word, _, backend = name.partition(", ")
        os.environ["LOCKSTEP_BACKEND"] = backend or BACKENDS[""]
        accelerator = Accelerator(cpu=True, parallel=word)
        model = task.model()
        model, optimizer = accelerator.prepare(model, task.optimizer(model))
        backward = accelerator.backward
    shares_batch = name.partition("=")[0] in ("tp", "pp", "cp")
    windows = task.windows(0 if shares_batch else rank, RANKS)

    def train() -> Iterator[Any]:
        for ((inputs, targets),) in windows:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            backward(loss)
            optimizer.step()
            yield loss.detach()

    return train()


def take_turns(chosen: argparse.Namespace) -> None:
    """For each line of the input a block of steps; a line of JSON says what each took."""
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    loop = steps_of(chosen)
    losses = [float(next(loop)) for _ in range(WARM_UP)]
    print(json.dumps({"losses": losses}), flush=True)
    for _ in sys.stdin:
        for _ in range(UNTIMED):
            next(loop)
        dist.barrier()
        medians, _ = common.time_steps(loop, chosen.steps, read=float)
        print(json.dumps(medians), flush=True)
    dist.destroy_process_group()


# In the process that compares them ------------------------------------------------------------------------------


class Contender:
    """Two processes that train when they are told to."""

    def __init__(self, name: str, chosen: argparse.Namespace) -> None:
        self.name = name
        flags = [f"--contender={name}", *common.arguments_of(chosen, "width", "layers", "steps")]
        group = {
            **os.environ,
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(common.free_port()),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "LOCKSTEP_WATCH": "false",  # each waits for its turn for longer than a step takes
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, *flags],
                env={**group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        self.losses = [said["losses"] for said in self.hear()]
        self.blocks: dict[str, list[float]] = {"wall_ms": [], "cpu_ms": []}

    def hear(self) -> list[Any]:
        """The next line of JSON of each rank; other lines are a library's own words."""
        found = []
        for process in self.processes:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith("{")), None)
            if line is None:
                raise SystemExit(f"{self.name} failed.")
            found.append(json.loads(line))
        return found

    def train(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        said = self.hear()
        for kind, values in self.blocks.items():
            values.append(max(one[kind] for one in said))  # the slower rank

    def end(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait(timeout=60)

    def over(self, other: Contender, kind: str = "wall_ms") -> common.Summary:
        return common.summary(common.ratios(self.blocks[kind], other.blocks[kind]))


def remarks(found: dict[str, Contender]) -> list[str]:
    """Each aim, and whether it was reached."""
    lines = []

    def judge(what: str, ratio: common.Summary, aim: float) -> None:
        lines.append(
            f"{what}: {ratio.show()}, at most {aim}: {'reached' if ratio.median <= aim else 'NOT REACHED'}"
        )

    for word, (over_alone, over_bare) in AIMS.items():
        if word in found and ALONE in found:
            judge(f"{word} over no communication", found[word].over(found[ALONE]), over_alone)
        if over_bare is not None and word in found and BARE in found:
            judge(f"{word} over bare DDP on gloo", found[word].over(found[BARE]), over_bare)
    for word in ("tp=2", "pp=2", "cp=2"):
        if word in found and f"{word}, gloo" in found:
            judge(f"{word} over the same on gloo", found[word].over(found[f"{word}, gloo"]), OVER_GLOO)
    return lines


def deviation(contender: Contender, found: dict[str, Contender]) -> float:
    """Of the first losses from those of bare DDP's ranks, or where ranks share a batch, from its first rank's."""
    if contender.name == ALONE or BARE not in found:  # it averages no gradients
        return 0.0
    expected, count = found[BARE].losses, len(contender.losses[0])
    if contender.name.partition("=")[0] in ("tp", "pp", "cp"):
        expected, count = [expected[0]] * RANKS, 1  # later steps have learnt from one batch, not from two
    return max(
        abs(mine / theirs - 1)
        for ours, other in zip(contender.losses, expected, strict=True)
        for mine, theirs in list(zip(ours, other, strict=True))[:count]
    )


def main() -> None:
    chosen = options()
    if chosen.contender:
        take_turns(chosen)
        return
    report = common.Report("strategies", f"Step time of a GPT, {RANKS} processes")
    wanted = [
        name
        for name in names()
        if not chosen.only or name in (ALONE, BARE) or name.split(",")[0] in chosen.only
    ]
    found = {name: Contender(name, chosen) for name in wanted}
    for turn in range(chosen.rounds):
        for name in wanted[:: -1 if turn % 2 else 1]:
            found[name].train()
    for contender in found.values():
        contender.end()
    figures, rows, differ = [], [], []
    for name, one in found.items():
        times = {kind: common.summary(values) for kind, values in one.blocks.items()}
        ratios = {
            f"{kind.removesuffix('_ms')} over {other}": one.over(found[other], kind)
            for other in (ALONE, BARE, f"{name}, gloo")
            if other in found and other != name
            for kind in one.blocks
        }
        apart = deviation(one, found)
        if not apart <= LOSS_TOLERANCE:
            differ.append(f"LOSSES DIFFER: {name}, by {apart:.1e}. Its times mean nothing.")
        figures.append(
            {
                "contender": name,
                "loss_deviation": apart,
                **{key: value.to_dict() for key, value in {**times, **ratios}.items()},
            }
        )
        shown = [
            ratios[key].show() if key in ratios else "" for key in (f"wall over {ALONE}", f"wall over {BARE}")
        ]
        gloo = ratios.get(f"wall over {name}, gloo")
        cpu = ratios.get(f"cpu over {ALONE}")
        rows.append(
            [
                name,
                times["wall_ms"].show(1),
                *shown,
                gloo.show() if gloo else "",
                times["cpu_ms"].show(1),
                cpu.show() if cpu else "",
            ]
        )
    columns = [
        "",
        "step, ms",
        f"over {ALONE}",
        f"over {BARE}",
        "over itself on gloo",
        "CPU, ms",
        f"over {ALONE}",
    ]
    settings = {name: getattr(chosen, name) for name in ("rounds", "steps", "width", "layers")}
    report.finish(columns, rows, figures, settings, chosen.output, [*remarks(found), *differ])
    if differ:
        raise SystemExit("\n".join(differ))


if __name__ == "__main__":
    main()
