"""Which group is loaded next, and which is let go."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.offload.weights import Successors, choose_ahead, choose_urgent
from tests.marks import examples

Trace = Sequence[tuple[int, bool]]  # group, and whether in backward


def forward(n: int) -> Trace:
    return [(group, False) for group in range(n)]


def training(n: int) -> Trace:
    return [*forward(n), *((group, True) for group in reversed(range(n)))]


class Memory:
    """Carries out choices at once, and checks that they may be."""

    def __init__(self, sizes: dict[int, int], budget: int, ahead: int) -> None:
        self.sizes, self.budget, self.ahead = sizes, budget, ahead
        self.successors = Successors(list(sizes))
        self.loaded: set[int] = set()
        self.unused: set[int] = set()
        self.loads = self.urgent = 0

    def use(self, group: int, in_backward: bool) -> None:
        self.successors.learn(group, in_backward)
        coming = 2 * len(self.sizes) + 1
        if group not in self.loaded:
            self.urgent += 1
            choice = choose_urgent(
                group, self.sizes, self.budget, self.loaded, [], self.successors.coming(coming)
            )
            assert choice is not None and choice.load == group
            self._carry_out(choice, held=())
        self.unused.discard(group)
        for _ in range(3 * len(self.sizes)):  # more than a choice for each is a cycle
            choice = choose_ahead(
                self.sizes,
                self.budget,
                self.loaded,
                self.unused,
                [group],
                self.successors.coming(coming),
                self.ahead,
            )
            if choice is None:
                return
            self._carry_out(choice, held=(group,))
        pytest.fail("choices go round")

    def _carry_out(self, choice, held) -> None:
        assert self.loaded.issuperset(choice.evict) and not set(choice.evict).intersection(held)
        assert choice.load not in self.loaded
        self.loaded.difference_update(choice.evict)
        self.unused.difference_update(choice.evict)
        self.loaded.add(choice.load)
        self.unused.add(choice.load)
        self.loads += 1
        assert sum(self.sizes[one] for one in self.loaded) <= self.budget

    def run(self, trace: Trace) -> tuple[int, int]:
        """(loads, of these urgent ones)."""
        loads, urgent = self.loads, self.urgent
        for group, in_backward in trace:
            self.use(group, in_backward)
            assert group in self.loaded
        return self.loads - loads, self.urgent - urgent


def test_before_anything_is_learnt_groups_follow_in_order_of_registration() -> None:
    successors = Successors("abcd")
    assert list(successors.coming(3)) == ["a", "b", "c"]
    successors.learn("b")
    assert list(successors.coming(5)) == ["c", "d", "a", "b", "c"]


def test_before_a_backward_is_learnt_groups_follow_in_reverse_order_and_then_the_next_forward() -> None:
    successors = Successors("abcd")
    for group in "abcd":
        successors.learn(group)
    successors.learn("d", in_backward=True)
    assert list(successors.coming(3)) == ["c", "b", "a"]
    successors.learn("c", in_backward=True)
    assert list(successors.coming(5)) == ["b", "a", "b", "c", "d"]


def test_what_was_seen_last_after_two_groups_is_expected_again() -> None:
    successors = Successors("abcd")
    for group in "adbadcadb":
        successors.learn(group)
    # after (d, b) came a; after (b, a) d; after (a, d) last b
    assert list(islice(successors.coming(9), 5)) == ["a", "d", "b", "a", "d"]


def test_training_is_foreseen_from_the_second_step_on() -> None:
    successors = Successors(range(4))
    for group, in_backward in [*training(4), *training(4)]:
        successors.learn(group, in_backward)
    assert list(successors.coming(6)) == [1, 2, 3, 2, 1, 0]


def test_uses_of_one_group_one_after_the_other_are_one() -> None:
    successors = Successors("ab")
    for group in "aaabbbaaabbb":
        successors.learn(group)
    assert list(successors.coming(3)) == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("n", "budget", "ahead"), [(10, 4, 2), (10, 6, 2), (10, 9, 2), (9, 5, 1), (20, 10, 3)]
)
def test_repeated_forwards_load_what_the_least_possible_number_of_loads_with_less_room_is(
    n, budget, ahead
) -> None:
    """Belady's optimum for a cycle of n with c places is n - c misses in n - 1 uses; ``ahead`` places are for loads."""
    memory = Memory(dict.fromkeys(range(n), 1), budget, ahead)
    memory.run([*forward(n), *forward(n)])
    loads, urgent = memory.run(list(forward(n)) * (n - 1))
    assert loads == n * (n - (budget - ahead))
    assert loads <= (n - 1) * (n - (budget - ahead - 1))
    assert urgent == 0


@pytest.mark.parametrize(("n", "budget", "ahead"), [(10, 4, 2), (10, 9, 2), (9, 5, 1), (20, 10, 3)])
def test_training_loads_in_each_direction_what_has_no_room(n, budget, ahead) -> None:
    memory = Memory(dict.fromkeys(range(n), 1), budget, ahead)
    memory.run(training(n))
    assert [memory.run(training(n)) for _ in range(3)] == [(2 * (n - budget), 0)] * 3


def test_with_room_for_all_nothing_is_loaded_twice() -> None:
    memory = Memory(dict.fromkeys(range(5), 3), budget=15, ahead=2)
    assert memory.run(list(training(5)) * 3) == (5, 1)


def test_with_room_for_one_each_use_loads() -> None:
    memory = Memory(dict.fromkeys(range(5), 3), budget=3, ahead=2)
    assert memory.run(list(forward(5)) * 2) == (10, 10)


def test_groups_that_are_not_used_any_more_make_room() -> None:
    memory = Memory(dict.fromkeys(range(6), 1), budget=4, ahead=1)
    memory.run(forward(6))
    some = [(0, False), (1, False), (2, False)]
    memory.run(some * 3)
    assert memory.run(some * 3) == (0, 0)


def test_nothing_is_let_go_for_a_group_that_is_used_later() -> None:
    sizes = dict.fromkeys("abc", 1)
    assert choose_ahead(sizes, 2, {"a", "b"}, set(), ["a"], "bcab", ahead=2) is None
    choice = choose_ahead(sizes, 2, {"a", "b"}, set(), ["a"], "cabc", ahead=2)
    assert choice is not None and (choice.load, choice.evict) == ("c", ("b",))


def test_not_more_groups_are_loaded_ahead_than_asked_for() -> None:
    sizes = dict.fromkeys("abcd", 1)
    assert choose_ahead(sizes, 4, {"a", "b", "c"}, {"b", "c"}, ["a"], "bcda", ahead=2) is None
    choice = choose_ahead(sizes, 4, {"a", "b", "c"}, {"b", "c"}, ["a"], "bcda", ahead=3)
    assert choice is not None and (choice.load, choice.evict) == ("d", ())
    assert choose_ahead(sizes, 4, {"a"}, set(), ["a"], "bcda", ahead=0) is None


def test_no_choice_is_made_where_what_is_held_leaves_no_room() -> None:
    sizes = {"a": 2, "b": 2, "c": 3}
    assert choose_urgent("c", sizes, 4, {"a", "b"}, ["a"], "abc") is None
    choice = choose_urgent("c", sizes, 4, {"a", "b"}, [], "abc")
    assert choice is not None and set(choice.evict) == {"a", "b"}


@examples(100)
@given(st.data())
def test_any_use_finds_its_group_within_the_budget(data: st.DataObject) -> None:
    """Memory checks after each choice: the budget, that no group in use goes, that no choices go round."""
    n = data.draw(st.integers(1, 8))
    sizes = {group: data.draw(st.integers(0, 5)) for group in range(n)}
    budget = data.draw(st.integers(max(sizes.values()), sum(sizes.values()) + 1))
    memory = Memory(sizes, budget, data.draw(st.integers(0, 4)))
    trace = data.draw(st.lists(st.tuples(st.integers(0, n - 1), st.booleans()), max_size=30))
    loads, urgent = memory.run(trace * data.draw(st.integers(1, 3)))
    assert urgent <= loads
