"""The orders in which the stages of a pipeline work, for pipeline.py: lists of actions, and how long they are idle."""

from __future__ import annotations

from collections.abc import Callable

Action = tuple[str, int]
"""What to do with which micro-batch: F forward, B backward; or I and W, the halves of a backward (inputs, weights)."""
Schedule = Callable[[int, int, int], list[Action]]


def gpipe(stage: int, stages: int, micros: int) -> list[Action]:
    return [("F", m) for m in range(micros)] + [("B", m) for m in range(micros)]


def one_f_one_b(stage: int, stages: int, micros: int) -> list[Action]:
    # Enough forwards to keep the later stages busy; then each backward makes room for
    # one more forward.
    ahead = min(stages - stage - 1, micros)
    steady = [action for m in range(micros - ahead) for action in (("F", ahead + m), ("B", m))]
    return [("F", m) for m in range(ahead)] + steady + [("B", m) for m in range(micros - ahead, micros)]


def zero_bubble(stage: int, stages: int, micros: int) -> list[Action]:
    # The stage before waits for I, and nobody for W. The later a stage, the more of its
    # Ws it can put off: it has fewer micro-batches on the way than the first stage has.
    actions: list[Action] = []
    for kind, m in one_f_one_b(stage, stages, micros):
        actions.append(("I" if kind == "B" else kind, m))
        if kind == "B" and m >= stage:
            actions.append(("W", m - stage))
    return actions + [("W", m) for m in range(max(0, micros - stage), micros)]


def timeline(schedule: Schedule, stages: int, micros: int) -> list[list[tuple[Action, int, int]]]:
    """Of each stage: its actions with their start and end, where F, I and W take a unit of time each, and B two."""
    waiting = [schedule(stage, stages, micros) for stage in range(stages)]
    done: list[list[tuple[Action, int, int]]] = [[] for _ in range(stages)]
    ended: dict[tuple[str, int, int], int] = {}
    while any(waiting):
        for stage, actions in enumerate(waiting):
            if not actions:
                continue
            kind, m = actions[0]
            # A forward needs that of the stage before, a backward that of the stage
            # after it, and W nothing.
            before = {"F": stage - 1, "B": stage + 1, "I": stage + 1, "W": -1}[kind]
            if 0 <= before < stages and (kind, before, m) not in ended:
                continue
            free = done[stage][-1][2] if done[stage] else 0
            start = max(free, ended.get((kind, before, m), 0))
            ended[kind, stage, m] = start + (2 if kind == "B" else 1)
            done[stage].append((actions.pop(0), start, ended[kind, stage, m]))
    return done


def idle_time(schedule: Schedule, stages: int, micros: int) -> int:
    """How long a stage has nothing to do, until the last of them is done."""
    return max(spans[-1][2] for spans in timeline(schedule, stages, micros)) - 3 * micros
