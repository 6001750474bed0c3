"""Commands called in this process."""

from __future__ import annotations

import pytest

from lockstep.cli import run_lockstep


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, and what was printed to both streams."""
    with pytest.raises(SystemExit) as ended:
        run_lockstep([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out, captured.err


def check_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    """The command ends with code 2 and one short message."""
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("lockstep: error: ") == 1
    assert len(err) < 500
