"""Where a run is, and how it goes on there."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models import Models
from options import Options
from rollout import Rollout


@dataclass
class Progress:
    """Where the run is. It is saved with the policy, so that a run goes on between a rollout and its epochs, too."""

    iteration: int = 0
    epoch: int = 0  # of training on this rollout
    boundary: int = 0
    rollout: Rollout | None = None
    history: list[dict[str, float]] = field(default_factory=list)  # of each iteration

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "rollout": None if self.rollout is None else self.rollout.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.rollout = None if state["rollout"] is None else Rollout(**state["rollout"])


class Checkpoints:
    """`OUT/0000012/value` and `OUT/0000012/policy`, after 12 boundaries; complete where the latter is there."""

    def __init__(self, models: Models, progress: Progress, options: Options) -> None:
        self.models, self.progress, self.options = models, progress, options
        models.accelerator.register_for_checkpointing(progress)
        if options.out is not None:
            models.accelerator.register_preemption_hook(self.save)

    def save(self) -> str:
        folder = Path(self.options.out or "") / f"{self.progress.boundary:07d}"
        if self.models.value_accelerator is not None:
            self.models.value_accelerator.save_state(folder / "value")
        return self.models.accelerator.save_state(folder / "policy")

    def load(self) -> None:
        found = sorted(Path(self.options.out or "").glob("[0-9]*/policy"))
        if found:
            if self.models.value_accelerator is not None:
                self.models.value_accelerator.load_state(found[-1].parent / "value")
            self.models.accelerator.load_state(found[-1])

    def boundary(self) -> bool:
        """A rollout or an epoch is over: save if it is time, stop if somebody asked; whether the run ends here."""
        self.progress.boundary += 1
        if self.options.save_every and self.progress.boundary % self.options.save_every == 0:
            self.save()
        self.models.accelerator.check_preemption()
        return self.progress.boundary == self.options.stop_at
