"""What is done at steps whose loss or gradient norm jumps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lockstep.config.handlers import DamageChecks, KwargsHandler
from lockstep.config.values import suggestion
from lockstep.errors import ConfigError

ACTIONS = ["skip", "stop", "rollback"]
LARGEST_WINDOW = 10_000


@dataclass
class SpikePolicy(KwargsHandler):
    """Watches the loss and the gradient norm of each step before it is made; all ranks decide alike.

    A value is a spike if it is not finite, or if (value - median) / (1.4826 * MAD) is above a threshold. The median,
    and MAD, the median of the distances from it, are those of the latest steps that were made.

    - ``action``: ``skip``: no rank makes the step; ``stop``: all raise ``SpikeError`` before it; ``rollback``: all go
      back to the newest checkpoint, and on with the batches behind the spike.
    - ``loss_threshold``, ``gradient_norm_threshold``: above 0; None: this one is not looked at, except for a loss that
      is not finite.
    - ``window``: of how many steps the median is, 4 to 10000.
    - ``warmup``: so many steps must have been made before thresholds are applied, 4 to ``window``.
    - ``max_skips``: stop after so many skipped steps in a row, or after going back to one checkpoint so many times.
    - ``skip_batches``: with ``rollback``, so many further micro-batches of each rank are left out, at most to the end
      of the epoch.
    - ``capsules``: of how many of the latest spikes the run's folder keeps what ``lockstep replay`` needs; 0: none.
    - ``capsule_weights``: whether a capsule has the models' weights of that moment.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, SpikePolicy

        accelerator = Accelerator(kwargs_handlers=[SpikePolicy(action="skip", warmup=8)])
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for step in range(12):
            batch = torch.ones(8, 4) * (1000 if step == 10 else 1 + step % 3)  # one is damaged
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            if step == 10:
                assert optimizer.step_was_skipped
            optimizer.zero_grad()
        ```
    """

    action: Literal["skip", "stop", "rollback"] = "skip"
    loss_threshold: float | None = 8.0
    gradient_norm_threshold: float | None = 10.0
    window: int = 128
    warmup: int = 32
    max_skips: int = 10
    skip_batches: int = 0
    capsules: int = 3
    capsule_weights: bool = True

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            near = suggestion(str(self.action), ACTIONS) or " Pass one of them."
            raise ConfigError(f"action is {self.action!r}, which is not one of {', '.join(ACTIONS)}.{near}")
        for name in ("loss_threshold", "gradient_norm_threshold"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value!r}, but must be a number above 0. Pass one, or None.")
        _check_between("window", self.window, 4, LARGEST_WINDOW)
        _check_between("warmup", self.warmup, 4, self.window)
        _check_between("max_skips", self.max_skips, 0, 2**31)
        _check_between("skip_batches", self.skip_batches, 0, 2**31)
        if self.skip_batches and self.action != "rollback":
            raise ConfigError(
                f"skip_batches is {self.skip_batches}, but action {self.action!r} leaves out the batches of the spike "
                "alone. Remove it, or pass action='rollback'."
            )
        _check_between("capsules", self.capsules, 0, 10_000)
        if not isinstance(self.capsule_weights, bool):
            raise ConfigError(f"capsule_weights is {self.capsule_weights!r}, but must be True or False.")


def _check_between(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}, but must be an integer from {low} to {high}. Pass one.")


def checked_policy(given: SpikePolicy | None, damage: DamageChecks) -> SpikePolicy | None:
    """The policy, if this run can follow one. Raises ConfigError where others decide about the same steps."""
    if given is not None and damage.bad_gradients != "ignore":
        raise ConfigError(
            f"DamageChecks(bad_gradients={damage.bad_gradients!r}) and SpikePolicy both decide about steps whose "
            "gradients are not finite. Leave bad_gradients at 'ignore': they are spikes, too."
        )
    return given
