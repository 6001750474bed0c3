"""What is done at steps whose loss or gradient norm jumps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lockstep.config.handlers import DamageChecks, KwargsHandler
from lockstep.config.values import check_between, check_word
from lockstep.errors import ConfigError

ACTIONS = ["skip", "stop", "rollback"]
LARGEST_WINDOW = 10_000


@dataclass
class SpikePolicy(KwargsHandler):
    """Options for spikes: before each step, the loss and the gradient norm are compared with those of earlier steps.

    A value is a spike if it is not finite, or if (value - median) / (1.4826 * MAD) is above a threshold. The median
    is that of the latest steps that were made. MAD is the median of their distances from it. All ranks decide alike.

    - ``action``: what happens at a spike. ``skip``: no rank makes the step. ``stop``: all ranks raise ``SpikeError``
      before the step. ``rollback``: all ranks load the newest checkpoint, and go on with the batches after the spike.
    - ``loss_threshold``: the threshold of the loss, above 0. None: the loss is not compared. A loss that is not
      finite is a spike all the same.
    - ``gradient_norm_threshold``: the threshold of the gradient norm, above 0. None: the norm is not compared.
    - ``window``: the number of steps of which the median is taken, 4 to 10000.
    - ``warmup``: the number of steps before thresholds are applied, 4 to ``window``.
    - ``max_skips``: the number of skipped steps in a row, or of rollbacks to one checkpoint, after which the run
      stops.
    - ``skip_batches``: with ``rollback``, the number of further micro-batches that each rank leaves out, at most to
      the end of the epoch.
    - ``capsules``: the number of latest spikes of which the run's folder keeps what ``lockstep replay`` needs. 0: it
      keeps nothing.
    - ``capsule_weights``: whether a capsule also has the weights that the models had at the spike.

    Raises:
        ConfigError: a value is out of range, or ``skip_batches`` is set without ``rollback``.

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
        check_word("action", self.action, ACTIONS)
        for name in ("loss_threshold", "gradient_norm_threshold"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and math.isfinite(value) and value > 0):
                raise ConfigError(
                    f"{name} is {value!r}, but must be a number above 0. Pass such a number, or None."
                )
        check_between("window", self.window, 4, LARGEST_WINDOW)
        check_between("warmup", self.warmup, 4, self.window)
        check_between("max_skips", self.max_skips, 0, 2**31)
        check_between("skip_batches", self.skip_batches, 0, 2**31)
        if self.skip_batches and self.action != "rollback":
            raise ConfigError(
                f"skip_batches is {self.skip_batches}, but action {self.action!r} leaves out the batches of the "
                "spike alone. Remove skip_batches, or pass action='rollback'."
            )
        check_between("capsules", self.capsules, 0, 10_000)
        if not isinstance(self.capsule_weights, bool):
            raise ConfigError(
                f"capsule_weights is {self.capsule_weights!r}, but must be True or False. Pass one of them."
            )


def checked_policy(given: SpikePolicy | None, damage: DamageChecks) -> SpikePolicy | None:
    """Return the policy, if this run can follow one. Raises ConfigError where others decide about the same steps."""
    if given is not None and damage.bad_gradients != "ignore":
        raise ConfigError(
            f"DamageChecks(bad_gradients={damage.bad_gradients!r}) and SpikePolicy both decide what to do with "
            "gradients that are not finite. Leave bad_gradients at 'ignore': SpikePolicy treats such steps as "
            "spikes."
        )
    return given
