"""Timelines of schedules in letters."""

from __future__ import annotations

from lockstep.plan import Action, Times, action_lists, simulate, text_rows


def test_letters_stand_where_actions_run() -> None:
    def lines(lists: list[list[Action]], times: Times = Times()) -> list[str]:  # noqa: B008
        return ["".join(text for text, _ in row) for row in text_rows(simulate(lists, times))]

    assert lines(action_lists("1f1b", 2, 2)) == [
        "F0 F1       B0---    B1--- ",
        "   F0 B0--- F1 B1---       ",
    ]
    assert lines(action_lists("zbv", 1, 1)) == ["F0a F0b I0b W0b I0a W0a "]
    assert {len(line) for line in lines(action_lists("zbv", 4, 12), Times(1, 1.7, 0.3))} != {0}
    assert lines([[]]) == []
    assert lines(action_lists("gpipe", 2, 400)) == []
