"""Step time of each stage of ZeRO: Lockstep, bare fully_shard by hand, DeepSpeed; and plain DDP.

    python benchmarks/zero_step_time.py            # stages 1 to 3, and 1 and 2 with 4 micro-batches a step
    python benchmarks/zero_step_time.py --quick
    python benchmarks/zero_step_time.py --sweep    # which of DeepSpeed's settings are the quickest here

For each configuration all contenders live in the same two processes and take turns in blocks of steps, forwards
and backwards; a ratio compares two blocks of one round. One thread a process. Their losses must agree at every
step, or the comparison is refused: the exit status is 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import common

Blocks = dict[str, list[float]]  # "wall_ms", "cpu_ms": the median step of each round
WORLD_SIZE = 2
UNTIMED = 2  # steps at the beginning of a block, while caches still hold another model
WARM_UP = 10
LOSS_TOLERANCE = 1e-5  # relative
AIM = 1.02
BESIDE = ["over hand-written", "over DDP"]
COLUMNS = ["configuration", "loop", "step, ms", *BESIDE, "CPU, ms", *BESIDE, "loss differs by"]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3], help="default 1 2 3")
    parser.add_argument(
        "--accumulation", type=int, nargs="+", default=[1, 4], help="micro-batches a step (default 1 4)"
    )
    parser.add_argument("--fused", action="store_true", help="torch's fused AdamW for everyone")
    parser.add_argument("--sweep", action="store_true", help="DeepSpeed's settings instead of the contenders")
    return common.parse_for_blocks(parser, "zero_step_time", rounds=16, quick_rounds=3)


def worker(chosen: argparse.Namespace) -> None:
    """One rank and configuration: takes the turns; rank 0 writes all times and each largest loss deviation."""
    import torch
    import torch.distributed as dist

    from zero_contenders import REFERENCE, ZeroTask, contenders, sweep

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = ZeroTask(chosen.stages[0], chosen.accumulation[0], chosen.fused)
    makers = (sweep if chosen.sweep else contenders)(task.stage)
    wanted = [name for name in makers if not chosen.only or name == REFERENCE or name in chosen.only]
    loops = {name: makers[name](task, dist.get_rank(), WORLD_SIZE) for name in wanted}
    losses = {name: [float(next(loop)) for _ in range(WARM_UP)] for name, loop in loops.items()}
    blocks: dict[str, Blocks] = {name: {"wall_ms": [], "cpu_ms": []} for name in wanted}
    gc.collect()
    gc.freeze()
    assert torch.get_num_threads() == 1
    for turn in range(chosen.rounds):
        for name in wanted[:: -1 if turn % 2 else 1]:
            dist.barrier()
            losses[name] += time_block(loops[name], chosen.steps, blocks[name])
    expected = torch.tensor(losses[REFERENCE])
    deviation = torch.stack([(torch.tensor(losses[name]) / expected - 1).abs().max() for name in wanted])
    dist.all_reduce(deviation, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        found = dict(zip(wanted, deviation.tolist(), strict=True))
        chosen.worker.write_text(json.dumps({"blocks": blocks, "loss_deviation": found}))
    dist.barrier()
    dist.destroy_process_group()


def time_block(loop: Any, steps: int, blocks: Blocks) -> list[float]:
    """Append the medians over a block's steps of wall-clock and of this process's CPU time; returns all losses."""
    losses = [float(next(loop)) for _ in range(UNTIMED)]
    medians, timed = common.time_steps(loop, steps, read=float)
    for kind, median in medians.items():
        blocks[kind].append(median)
    return losses + timed


def summaries(blocks: dict[str, Blocks]) -> dict[str, dict[str, common.Summary]]:
    """Of each contender: its times, and their ratios to those of each other contender in the same round."""
    return {
        name: {kind: common.summary(values) for kind, values in mine.items()}
        | {
            f"{kind.removesuffix('_ms')} over {other}": common.summary(
                common.ratios(mine[kind], theirs[kind])
            )
            for other, theirs in blocks.items()
            for kind in mine
            if other != name
        }
        for name, mine in blocks.items()
    }


def verdicts(found: dict[str, dict[str, common.Summary]]) -> list[str]:
    """Whether Lockstep is at most 1.02 of the hand-written loop, and below DeepSpeed in both its forms."""
    lines = []
    for other in ("hand-written", "deepspeed", "deepspeed, tuned"):
        if "lockstep" not in found or other not in found:
            continue
        aim, words = (AIM, f"at most {AIM}") if other == "hand-written" else (1.0, "below 1")
        for kind in ("wall", "cpu"):
            ratio = found["lockstep"][f"{kind} over {other}"]
            met = ratio.median <= aim if other == "hand-written" else ratio.median < aim
            lines.append(f"{kind} over {other} {ratio.show()}, {words}: {'met' if met else 'MISSED'}")
    return lines


def row(label: str, name: str, one: dict[str, common.Summary], deviation: float) -> list[str]:
    def ratio(kind: str, other: str) -> str:
        return one[f"{kind} over {other}"].show() if f"{kind} over {other}" in one else ""

    times = [one["wall_ms"].show(1), ratio("wall", "hand-written"), ratio("wall", "ddp")]
    cpu = [one["cpu_ms"].show(1), ratio("cpu", "hand-written"), ratio("cpu", "ddp")]
    return [label, name, *times, *cpu, f"{deviation:.0e}"]


def measure(chosen: argparse.Namespace, stage: int, accumulation: int, folder: str) -> Any:
    """Run one configuration in two processes of its own; see ``worker`` for what it returns."""
    path = Path(folder, f"{stage}_{accumulation}.json")
    rounds = chosen.rounds if accumulation == 1 else max(2, chosen.rounds // 2)
    given = {"stages": stage, "accumulation": accumulation, "rounds": rounds, "worker": path}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    common.run_workers(__file__, [*sys.argv[1:], *words], WORLD_SIZE)
    return json.loads(path.read_text())


def settings(chosen: argparse.Namespace) -> dict[str, Any]:
    from zero_contenders import TUNED, ZeroTask

    task = asdict(ZeroTask(stage=0, fused=chosen.fused))
    return {
        **{name: task[name] for name in ("width", "layers", "heads", "batch_size", "fused")},
        "rounds": chosen.rounds,
        "steps": chosen.steps,
        "untimed": UNTIMED,
        "threads": 1,
        "processes": WORLD_SIZE,
        "deepspeed, tuned": TUNED,
    }


def main() -> None:
    chosen = options()
    if chosen.worker is not None:
        worker(chosen)
        return
    report = common.Report("zero_step_time", "Step time under ZeRO, 2 processes")
    rows: list[list[str]] = []
    figures: list[dict[str, Any]] = []
    differ: list[str] = []
    notes = [
        f"Medians (quartiles) over {chosen.rounds} rounds (half as many with several micro-batches) of a block of "
        f"{chosen.steps} steps each; rank 0.",
        "'hand-written again' is the same loop twice: what differs from 1 there is noise.",
    ]
    configurations = [(s, a) for a in chosen.accumulation for s in chosen.stages if a == 1 or s < 3]
    with tempfile.TemporaryDirectory() as folder:
        for stage, accumulation in configurations:
            written = measure(chosen, stage, accumulation, folder)
            found = summaries(written["blocks"])
            label = f"stage {stage}" + (f", {accumulation} micro-batches" if accumulation > 1 else "")
            notes += [f"{label}: lockstep, {line}" for line in verdicts(found)]
            for name, one in found.items():
                deviation = written["loss_deviation"][name]
                if not deviation <= LOSS_TOLERANCE:
                    differ.append(
                        f"LOSSES DIFFER: {label}, {name}: by {deviation:.1e}. Its times mean nothing."
                    )
                rows.append(row(label, name, one, deviation))
                place = {"stage": stage, "accumulation": accumulation, "loop": name}
                times = {kind: value.to_dict() for kind, value in one.items()}
                figures.append({**place, "loss_deviation": deviation, **times})
    report.finish(COLUMNS, rows, figures, settings(chosen), chosen.output, [*notes, *differ])
    if differ:
        raise SystemExit("\n".join(differ))


if __name__ == "__main__":
    main()
