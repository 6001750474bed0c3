"""Recorded situations and the sentence that each must lead to."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from lockstep.errors import ControlError
from lockstep.observe.hang import (
    SILENCE,
    Evidence,
    Finding,
    PendingCollective,
    Silent,
    SourceLine,
    diagnose,
    named,
)

TRAIN = SourceLine("train.py", 57, "main")
SLOW = SourceLine("data.py", 88, "slow_fetch")
SAVE = SourceLine("train.py", 70, "main")
WORKERS = SourceLine("train.py", 50, "main", "waiting for its data-loader workers (pids 12 (stopped), 13)")
DEAD = SourceLine("train.py", 50, "main", "waiting for its data-loader workers (pid 13 (dead))")


def collective(
    operation: str = "all_reduce",
    number: int | None = 412,
    group: str = "0",
    sizes: str = "[4]",
    dtype: str = "float32",
    place: SourceLine | None = TRAIN,
    peer: int | None = None,
) -> PendingCollective:
    return PendingCollective(operation, number, group, sizes, dtype, place, peer)


def rank(
    number: int, *pending: PendingCollective, place: SourceLine = TRAIN, done: int = 411, **more: Any
) -> Evidence:
    """A rank in what is pending, or, if that is nothing, at work at the place."""
    values: dict[str, Any] = {"waits": bool(pending), "call": pending[0].operation if pending else ""} | more
    return Evidence(number, "node", 100 + number, 9, 6.0, place, pending, {"0": done}, "stack", **values)


def silent(number: int, state: str) -> Silent:
    return Silent(number, "node", 100 + number, 6.4, state)


def receive(by: int, peer: int | None, line: int = 20, operation: str = "recv") -> PendingCollective:
    return collective(operation, None, "0", "", "", SourceLine("pipe.py", line, f"stage_{by}"), peer)


PAIRS = {"0": (0, 1, 2, 3), "1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}

# name -> what the ranks say, world size, cause, blamed, the sentence's beginning
CASES: dict[str, tuple[list[Evidence | Silent], int, str, tuple[int, ...], str]] = {
    "the issue's": (
        [rank(0, collective()), rank(1, place=SLOW), rank(2, collective()), rank(3, collective())],
        4,
        "missing",
        (1,),
        "rank 1 never joined all_reduce #412 that ranks 0, 2, 3 entered at train.py:57; "
        "rank 1 is at data.py:88 in slow_fetch. ",
    ), "entered at different lines": (
        [rank(0, collective()), rank(1, collective(place=SAVE), place=SAVE), rank(2, place=SLOW)],
        3,
        "missing",
        (2,),
        "rank 2 never joined all_reduce #412 that rank 0 entered at train.py:57 and rank 1 at train.py:70; ",
    ), "asynchronous and elsewhere": (  # rank 1's own is not complete, but what holds it up is its data set
        [rank(0, collective(number=413)), rank(1, collective(), place=SLOW, waits=False)],
        2,
        "missing",
        (1,),
        "rank 1 never joined all_reduce #413",
    ), "shapes": (
        [rank(0, collective()), rank(1, collective(sizes="[5]", place=SAVE)), rank(2, collective())],
        3,
        "mismatch",
        (1,),
        "the ranks are in different collectives: ranks 0, 2 in all_reduce #412 of float32 [4] at "
        "train.py:57, rank 1 in all_reduce #412 of float32 [5] at train.py:70. ",
    ), "operations": (
        [rank(0, collective()), rank(1, collective("broadcast", place=SAVE)), rank(2, collective())],
        3,
        "mismatch",
        (1,),
        "the ranks are in different collectives: ranks 0, 2 in all_reduce #412 of float32 [4] at "
        "train.py:57, rank 1 in broadcast #412 of float32 [4] at train.py:70. Make every rank take the same path",
    ), "one got through": (  # rank 1's broadcast ended without rank 0, which is in another operation of that number
        [
            rank(0, collective()),
            rank(1, collective(number=413), done=412, recent=(collective("broadcast", place=None),)),
        ],
        2,
        "mismatch",
        (0, 1),
        "the ranks are in different collectives: rank 0 in all_reduce #412 of float32 [4] at "
        "train.py:57, rank 1 in broadcast #412 of float32 [4]. ",
    ), "sizes may differ in an all_to_all": (
        [rank(0, collective("all_to_all")), rank(1, collective("all_to_all", sizes="[9]")), rank(2, place=SLOW)],
        3,
        "missing",
        (2,),
        "rank 2 never joined all_to_all #412",
    ), "save_state on rank 0 only": (
        [
            rank(0, collective("all_gather", place=SAVE), call="Accelerator.save_state"),
            *(rank(one, collective(), call="backward") for one in (1, 2, 3)),
        ],
        4,
        "mismatch",
        (0,),
        "the ranks are in different collectives: ranks 1-3 in all_reduce #412 (backward) of "
        "float32 [4] at train.py:57, rank 0 in all_gather #412 (Accelerator.save_state) of float32 [4] at "
        "train.py:70. Call Accelerator.save_state on every rank",
    ), "save_state in a group of its own": (
        [
            rank(0, collective("all_gather", 3, "9", place=SAVE), place=SAVE, call="Accelerator.save_state"),
            rank(1, collective(), call="backward"),
        ],
        2,
        "mismatch",
        (0,),
        "the ranks wait for each other: rank 0 in all_gather #3 (Accelerator.save_state) at train.py:70, rank 1 in "
        "all_reduce #412 (backward) at train.py:57. Call Accelerator.save_state on every rank",
    ), "groups in different orders": (
        [
            rank(0, collective(number=5, group="1"), groups=PAIRS),
            rank(1, collective(place=SAVE), groups=PAIRS),
            rank(2, collective(place=SAVE), groups=PAIRS),
            rank(3, collective(place=SAVE), groups=PAIRS),
        ],
        4,
        "mismatch",
        (0,),
        "the ranks wait for each other: ranks 1-3 in all_reduce #412 at train.py:70, rank 0 in all_reduce #5 of "
        "ranks 0, 1 at train.py:57. Make every rank issue its collectives in the same order.",
    ), "a chain over groups": (  # 0 waits for 1 in a pair, 1 for 3 in another, 3 is slow
        [
            rank(0, collective(number=5, group="1"), groups=PAIRS),
            rank(1, collective(number=7, group="4", place=SAVE), groups=PAIRS),
            rank(2, collective(number=6, group="3"), groups=PAIRS),
            rank(3, place=SLOW, groups=PAIRS),
        ],
        4,
        "missing",
        (3,),
        "rank 3 never joined all_reduce #7 of ranks 1, 3 that rank 1 entered at train.py:70; "
        "rank 3 is at data.py:88 in slow_fetch (ranks 0, 2 wait behind it). ",
    ), "a pipeline": (
        [
            rank(0, receive(0, 1, 21)),
            rank(1, receive(1, 2, 22)),
            rank(2, receive(2, 3, 23)),
            rank(3, place=SLOW),
        ],
        4,
        "missing",
        (3,),
        "rank 3 never sent what rank 2 waits for at pipe.py:23; rank 3 is at data.py:88 in slow_fetch "
        "(ranks 0, 1 wait behind it). ",
    ), "a pipeline on gloo": (  # which stage waits for which is not known
        [*(rank(one, receive(one, None, operation="send/recv")) for one in (0, 1, 2)), rank(3, place=SLOW)],
        4,
        "missing",
        (3,),
        "rank 3 never took part in the send or receive in which",
    ), "stopped": (
        [rank(0, collective()), silent(1, "stopped"), rank(2, collective())],
        3,
        "stopped",
        (1,),
        "rank 1 is stopped (SIGSTOP or a debugger; pid 101 on node; silent for 6 s), and ranks 0, 2 wait for it in "
        "all_reduce #412 at train.py:57. ",
    ), "spinning": (
        [rank(0, collective()), silent(1, "running")],
        2,
        "spinning",
        (1,),
        "rank 1 does not answer: it gets no processor, or one call never releases Python's lock (the GIL; pid 101 on "
        "node; ",
    ), "asleep with the lock": ([silent(0, "sleeping")], 1, "silent", (0,), "rank 0 sleeps without answering"),
    "disk": ([silent(0, "uninterruptible")], 1, "silent", (0,), "rank 0 waits in the kernel for a disk"),
    "gone": (
        [silent(0, "gone"), silent(1, "sleeping"), silent(2, "unknown")],
        3,
        "silent",
        (0,),
        "rank 0 has lost its process",
    ), "a machine": (
        [rank(0, collective()), silent(1, "unknown"), silent(2, "unknown")],
        3,
        "silent",
        (1, 2),
        "ranks 1, 2 do not answer (its machine or its network may be down; silent for 6 s), and rank 0 waits for "
        "them in all_reduce #412",
    ), "nothing known of a rank": ([rank(0, collective())], 2, "silent", (1,), "rank 1 has made no Accelerator yet"),
    "stopped loader worker": (
        [rank(0, collective()), rank(1, place=WORKERS)],
        2,
        "data",
        (1,),
        "rank 1 never joined all_reduce #412 that rank 0 entered at train.py:57; rank 1 is at train.py:50 in main, "
        "waiting for its data-loader workers (pids 12 (stopped), 13). Let the stopped worker go on",
    ), "dead loader workers everywhere": (
        [rank(0, place=DEAD), rank(1, place=DEAD)],
        2,
        "data",
        (0, 1),
        "ranks 0, 1 get no data: ranks 0, 1 are at train.py:50 in main, waiting for its data-loader workers",
    ), "nobody waits": (
        [rank(0, place=SLOW), rank(1, place=SLOW), rank(2, place=SAVE)],
        3,
        "slow",
        (0, 1, 2),
        "no rank is in a collective and none ends its step: ranks 0, 1 are at data.py:88 in slow_fetch, rank 2 is at "
        "train.py:70 in main. ",
    ), "all entered": (
        [rank(0, collective()), rank(1, collective())],
        2,
        "slow",
        (0, 1),
        "every rank has entered its collective and none gets out: ranks 0, 1 in all_reduce #412 at train.py:57. ",
    ),
}  # fmt: skip


def over_the_network(fact: Evidence | Silent) -> Evidence | Silent:
    if isinstance(fact, Silent):
        return fact
    return Evidence.from_message(json.loads(json.dumps(fact.to_message())))


@pytest.mark.parametrize("name", CASES)
def test_the_sentence_names_who_where_and_what(name: str) -> None:
    facts, world_size, cause, ranks, sentence = CASES[name]
    random.Random(name).shuffle(facts)
    found = diagnose([over_the_network(fact) for fact in facts], world_size)
    assert found.sentence.startswith(sentence), found.sentence
    assert (found.cause, found.ranks) == (cause, ranks)
    assert found == diagnose(facts, world_size)


def test_what_is_known_of_silent_processes_has_a_sentence_in_one_and_in_many() -> None:
    for state in SILENCE:
        one, many = (diagnose([silent(rank, state) for rank in range(count)], count) for count in (1, 3))
        assert one.sentence.startswith("rank 0 ") and many.sentence.startswith("ranks 0-2 ")
        assert one.sentence.split()[2] != many.sentence.split()[2]


def test_a_long_story_is_cut_before_the_advice() -> None:
    ranks = [rank(0, collective())]
    ranks += [rank(one, place=SourceLine("x" * 400 + ".py", one, "y" * 400)) for one in range(1, 9)]
    found = diagnose(ranks, 9)
    assert len(found.sentence.partition(". Mend")[0]) <= 300
    assert found.sentence.startswith(
        "ranks 1-8 never joined all_reduce #412 that rank 0 entered at train.py:57; "
    )
    assert found.ranks == tuple(range(1, 9))


def test_ranks_are_named_in_runs() -> None:
    assert named([3]) == "rank 3"
    assert named([5, 0, 2, 4, 3]) == "ranks 0, 2-5"
    assert named([1, 2, 4]) == "ranks 1, 2, 4"


def test_any_facts_lead_to_a_finding_that_blames_ranks_of_the_run() -> None:
    draw = random.Random(0)
    for _ in range(300):
        size = draw.randint(1, 6)
        facts: list[Evidence | Silent] = []
        for number in draw.sample(range(size), draw.randint(0, size)):
            pending = [
                collective(
                    draw.choice(["all_reduce", "recv", "broadcast"]),
                    draw.choice([None, 411, 412, 413]),
                    draw.choice("012"),
                    place=draw.choice([None, TRAIN]),
                    peer=draw.choice([None, None, draw.randrange(size)]),
                )
                for _ in range(draw.randint(0, 2))
            ]
            one = rank(number, *pending, waits=draw.random() < 0.7, groups=draw.choice([{}, PAIRS]))
            facts.append(
                draw.choice([one, replace(one, place=None), silent(number, draw.choice([*SILENCE, "?"]))])
            )
        found = diagnose(facts, size)
        assert isinstance(found, Finding) and found.ranks and set(found.ranks) <= set(range(size))
        assert found.sentence.endswith(".") and "\n" not in found.sentence


def test_a_message_that_is_no_evidence_is_refused_and_texts_are_cut_and_printable() -> None:
    good = rank(0, collective()).to_message()
    assert Evidence.from_message(good) == rank(0, collective())
    for key, value in {
        "rank": -1,
        "pid": True,
        "step": 1.5,
        "idle_s": float("nan"),
        "host": 5,
        "pending": {"a": 1},
        "place": "here",
        "completed": [1],
        "stack": None,
        "groups": {"0": [2**70]},
        "recent": [{}],
    }.items():
        with pytest.raises(ControlError):
            Evidence.from_message(good | {key: value})
        with pytest.raises(ControlError):
            Evidence.from_message({other: one for other, one in good.items() if other != key})
    odd = Evidence.from_message(good | {"host": "\x1b[31m" + "h" * 9999, "stack": "a\nb\x07"})
    assert odd.host.startswith("?[31mh") and len(odd.host) == 512
    assert odd.stack == "a\nb?"
