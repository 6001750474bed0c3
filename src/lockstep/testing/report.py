"""What came of a check, as a test shows it."""

from __future__ import annotations

from lockstep.cli.output import table_text
from lockstep.config.files import JsonObject
from lockstep.verify import text
from lockstep.verify.judge.verdict import Mismatch, ParityVerdict


class ParityError(AssertionError):
    """A strategy does not compute what the reference computes.

    Args:
        report: Which tensors differ. It is the attribute ``report``.

    Examples:
        ```python
        # test_model.py
        import pytest
        import torch
        import torch.distributed as dist
        from lockstep.testing import ParityError, check_parity

        def make():
            model = torch.nn.Linear(4, 1)
            batches = [torch.randn(8, 4) for _ in range(2)]
            return model, torch.optim.SGD(model.parameters(), lr=0.1), batches, loss

        def loss(model, batch):
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            return model(batch).square().mean() / ranks  # wrong: gradients are averaged anyway

        def test_a_loss_that_is_divided_twice_is_noticed():
            with pytest.raises(ParityError) as caught:
                check_parity(make, nproc=2, steps=1)
            assert caught.value.report.findings
        ```
    """

    def __init__(self, report: ParityReport) -> None:
        super().__init__(str(report))
        self.report = report


class ParityReport:
    """The result of a check. ``str(report)`` is the text that ``lockstep check`` prints.

    The text has the answer, a table of the tensors that differ, and remarks.

    Args:
        verdict: The result as values. It is the attribute ``verdict``.

    Examples:
        ```python
        # test_model.py
        import pytest
        import torch
        import torch.distributed as dist
        from lockstep.testing import ParityError, compare_parity

        def make():
            model = torch.nn.Linear(4, 1)
            batches = [torch.randn(8, 4) for _ in range(2)]
            return model, torch.optim.SGD(model.parameters(), lr=0.1), batches, loss

        def loss(model, batch):
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            return model(batch).square().mean() / ranks  # wrong: gradients are averaged anyway

        def test_the_report_names_the_loss():
            report = compare_parity(make, nproc=2, steps=1)
            assert not report.agrees
            assert "loss" in report.sentence
            assert report.to_json()["findings"]
            with pytest.raises(ParityError):
                report.raise_if_differs()
        ```
    """

    def __init__(self, verdict: ParityVerdict) -> None:
        self.verdict = verdict

    @property
    def agrees(self) -> bool:
        """Whether every tensor that was compared agrees."""
        return self.verdict.agrees

    @property
    def sentence(self) -> str:
        """The answer in a sentence: that all agrees, or which tensor differs first, and what may be the cause."""
        return text.sentence(self.verdict)

    @property
    def findings(self) -> tuple[Mismatch, ...]:
        """The tensors that differ, in the order in which the run computes them."""
        return self.verdict.findings

    def raise_if_differs(self) -> None:
        """Raise an error if a tensor differs.

        Raises:
            ParityError: a tensor differs. The message is this report.
        """
        # With it pytest shows the test's own line.
        __tracebackhide__ = True
        if not self.agrees:
            raise ParityError(self)

    def to_json(self) -> JsonObject:
        """Return the report as plain values, as ``lockstep check --json`` writes it."""
        return text.to_json(self.verdict)

    def __str__(self) -> str:
        parts = [self.sentence]
        if self.findings:
            parts += ["", table_text(text.TITLES, text.rows(self.verdict), right=text.RIGHT), ""]
        return "\n".join([*parts, *text.remarks(self.verdict)])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.sentence}>"
