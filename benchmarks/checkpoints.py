"""Seconds to save and load a training state, beside torch.distributed.checkpoint and Accelerate.

    python benchmarks/checkpoints.py
    python benchmarks/checkpoints.py --quick

The state is that of AdamW after one step on linear layers. In each round every contender saves into a fresh
directory, then loads that into the same objects; they take turns in the same processes. What a save holds is the
same everywhere: weights, two moments, and the small rest. Only Lockstep's is verified while it is loaded.

Then Lockstep trains some steps without saving, saves in the background, and trains as many steps again while that save
is copied and written. "stands still" is the time in which the main thread does nothing for training: the call of
``save_state``, and what ``optimizer.step()`` waits for copies. "slower" is how much longer the steps
take than those before: it has what the writing threads take from cores and memory that training needs, too.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import common

REFERENCE = "torch dcp"
WIDTH = 1024
ROWS = 64
"""Of a batch: forward and backward compute about as long for each weight as in training of small models."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds of 48 MiB instead of 9 of 384 MiB")
    parser.add_argument("--rounds", type=int, help="saves and loads of each contender")
    parser.add_argument("--layers", type=int, help="layers of 4 MiB of weights, 12 MiB of state")
    parser.add_argument(
        "--steps", type=int, default=4, help="steps while a save in the background is written"
    )
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary directory)")
    parser.add_argument("--output", type=Path, help="JSON file (default benchmarks/results/checkpoints.json)")
    parser.add_argument(
        "--worker", nargs=3, metavar=("CONFIGURATION", "FOLDER", "FILE"), help=argparse.SUPPRESS
    )
    chosen = parser.parse_args()
    chosen.rounds = chosen.rounds or (3 if chosen.quick else 9)
    chosen.layers = chosen.layers or (4 if chosen.quick else 32)
    return chosen


class Objects:
    """A model and its optimizer, trained for one step, as a contender prepares them."""

    def __init__(self, accelerator: Any, layers: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.accelerator = accelerator
        self.train(2)

    def train(self, rows: int = ROWS) -> None:
        self.accelerator.backward(self.model(torch.randn(rows, WIDTH)).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()


def lockstep_contender(layers: int, parallel: str) -> dict[str, Callable[[str], Any]]:
    from lockstep import Accelerator

    accelerator = Accelerator(cpu=True, parallel=parallel)
    objects = Objects(accelerator, layers)
    STAND_STILL.append(StandStill(objects))
    return {
        "save": lambda folder: accelerator.save_state(folder),
        "load": lambda folder: accelerator.load_state(folder),
    }


def memory_contender(layers: int, parallel: str) -> dict[str, Callable[[str], Any]]:
    from lockstep import Accelerator, ProjectConfiguration

    folder = tempfile.mkdtemp()  # a checkpoint in memory has its number from there
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, parallel=parallel, project_config=project)
    objects = Objects(accelerator, layers)
    assert objects is not None
    return {
        "save": lambda _: accelerator.save_state(in_memory=True),
        "load": lambda _: accelerator.load_state(),
    }


class StandStill:
    """What a save in the background costs training."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._waited_s = 0.0

    def measure(self, folder: str, steps: int) -> dict[str, float]:
        """Seconds, of the slowest rank, of one save in the background."""
        accelerator = self._objects.accelerator
        without = seconds(lambda _: self._train(steps), folder)
        blocked = seconds(lambda _: accelerator.save_state(folder, blocking=False), folder)
        copies = accelerator._step.being_saved
        copies.before_step = self._timed(copies.before_step)
        self._waited_s = 0.0
        while_saved = seconds(lambda _: self._train(steps), folder)
        waited = of_slowest(self._waited_s)
        finish = seconds(lambda _: accelerator.wait_for_checkpoint(), folder)
        return {
            "blocked": blocked,
            "waited": waited,
            "stands_still": blocked + waited,
            "slower": while_saved - without,
            "steps": without,
            "finish": finish,
        }

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            self._objects.train()

    def _timed(self, wait: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            start = time.perf_counter()
            wait(*args)
            self._waited_s += time.perf_counter() - start

        return timed


STAND_STILL: list[StandStill] = []


def dcp_contender(layers: int, parallel: str) -> dict[str, Callable[[str], Any]]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from lockstep import Accelerator

    objects = Objects(Accelerator(cpu=True, parallel=parallel), layers)

    def state() -> dict[str, Any]:
        model, optimizer = get_state_dict(objects.model, objects.optimizer.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(folder: str) -> None:
        loaded = state()
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(
            objects.model,
            objects.optimizer.optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )

    return {"save": lambda folder: dcp.save(state(), checkpoint_id=folder), "load": load}


def accelerate_contender(layers: int, parallel: str) -> dict[str, Callable[[str], Any]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    objects = Objects(accelerator, layers)
    assert objects is not None
    return {"save": accelerator.save_state, "load": accelerator.load_state}


IN_MEMORY = "lockstep, in memory"
CONTENDERS = {
    "lockstep": lockstep_contender,
    IN_MEMORY: memory_contender,
    REFERENCE: dcp_contender,
    "accelerate": accelerate_contender,
}
# Accelerate trains as DDP on CPUs, whatever its FSDP plugin says.
CONFIGURATIONS = {
    "1 process": (1, "ddp", ["lockstep", IN_MEMORY, REFERENCE, "accelerate"]),
    "2 processes, DDP": (2, "ddp", ["lockstep", IN_MEMORY, REFERENCE, "accelerate"]),
    "2 processes, zero=3": (2, "zero=3", ["lockstep", IN_MEMORY, REFERENCE]),
}


def seconds(action: Callable[[str], Any], folder: str) -> float:
    """Of the slowest rank."""
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    action(folder)
    return of_slowest(time.perf_counter() - start)


def of_slowest(taken_s: float) -> float:
    """The largest number that a rank has."""
    taken = torch.tensor(taken_s)
    if dist.is_initialized():
        dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def work(chosen: argparse.Namespace) -> None:
    """One configuration: all contenders in turn; the first rank writes the seconds of each."""
    warnings.simplefilter("ignore")
    configuration, folder, file = chosen.worker
    _, parallel, names = CONFIGURATIONS[configuration]
    from lockstep import PartialState

    rank = PartialState(cpu=True).process_index
    actions = {name: CONTENDERS[name](chosen.layers, parallel) for name in names}
    taken: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for turn in range(-2, chosen.rounds):  # the first rounds fill caches, and memory for copies
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            place = os.path.join(folder, name.replace(" ", "-"))
            for kind, action in actions[name].items():
                value = seconds(action, place)
                if turn >= 0:
                    taken[name].setdefault(kind, []).append(value)
            if name == "lockstep":
                for kind, value in STAND_STILL[0].measure(place + "-later", chosen.steps).items():
                    if turn >= 0:
                        taken[name].setdefault(kind, []).append(value)
            if rank == 0:
                shutil.rmtree(place, ignore_errors=True)
                shutil.rmtree(place + "-later", ignore_errors=True)
                os.sync()  # nobody pays for another's pages
            if dist.is_initialized():
                dist.barrier()
    if rank == 0:
        Path(file).write_text(json.dumps(taken))


def main() -> None:
    chosen = options()
    if chosen.worker:
        work(chosen)
        return
    mib = chosen.layers * 12
    report = common.Report("checkpoints", f"Saving and loading {mib} MiB of training state")
    rows, figures = [], []
    for configuration, (world_size, _, _) in CONFIGURATIONS.items():
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            file = Path(folder, "seconds.json")
            arguments = ["--rounds", str(chosen.rounds), "--layers", str(chosen.layers)]
            arguments += ["--steps", str(chosen.steps)]
            common.run_workers(
                __file__, [*arguments, "--worker", configuration, folder, str(file)], world_size
            )
            taken = json.loads(file.read_text())
        for name, values in taken.items():
            entry = {kind: common.summary(of_kind) for kind, of_kind in values.items()}
            for kind in ("save", "load"):
                references = taken[REFERENCE][kind]
                entry[f"{kind}_ratio"] = common.summary(common.ratios(values[kind], references))
            if "stands_still" in values:
                for kind in ("stands_still", "slower"):
                    entry[f"{kind}_ratio"] = common.summary(common.ratios(values[kind], values["save"]))
            shown = [
                "save",
                "save_ratio",
                "load",
                "load_ratio",
                "stands_still",
                "stands_still_ratio",
                "slower",
            ]
            cells = [entry[kind].show(3) if kind in entry else "" for kind in shown]
            rows.append([configuration, name, *cells])
            summaries = {kind: one.to_dict() for kind, one in entry.items()}
            figures.append({"configuration": configuration, "contender": name, **summaries})
    report.finish(
        [
            "configuration",
            "",
            "save, s",
            "/ dcp",
            "load, s",
            "/ dcp",
            "stands still, s",
            "/ save",
            "slower, s",
        ],
        rows,
        figures,
        {"rounds": chosen.rounds, "mib": mib, "steps": chosen.steps, "rows": ROWS},
        chosen.output,
        [
            f"Medians (quartiles) of {chosen.rounds} rounds; ratios compare actions of one round.",
            "stands still: save_state(blocking=False) until it returns, and what steps wait for copies of it.",
            f"slower: by how much {chosen.steps} steps take longer while a save is copied and written.",
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
