"""Before each step: whether its loss or gradient norm is a spike, on all ranks alike."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from lockstep.comm.collectives import Communicator
from lockstep.comm.tree import StateDict
from lockstep.config.spikes import LARGEST_WINDOW, SpikePolicy
from lockstep.errors import CheckpointError, SpikeError, UsageError
from lockstep.observe.spikes.bad_step import BadStep, GoesBack, KeepsSteps, Spike
from lockstep.observe.spikes.history import RecentValues

logger = logging.getLogger("lockstep.spikes")

COUNTS = ("steps", "batches", "samples", "steps_skipped", "batches_skipped", "samples_skipped")
VALUES = ("loss", "gradient_norm")


class SpikeWatch:
    """Follows a ``SpikePolicy``. All ranks have the same numbers and decide alike.

    Args:
        ranks_step_together: Whether all ranks make this step with averaged gradients.
        samples: Those of all ranks in the window of micro-batches that is stepped on; None: not known.
        tell: Called with the values of an event for each spike.
        keeper: Keeps what is trained on, and writes it down where it is a spike.

    Attributes:
        steps: Steps of the run that were asked for, with those before a restart and those skipped.
        batches: Micro-batches of each rank in them, calls of ``backward``, and those that were left out unseen.
        samples: Samples of all ranks in them, as far as the loader tells.
        steps_skipped: Steps that no rank made, or that were undone.
        batches_skipped: Micro-batches of each rank in them, and those that were left out unseen.
        samples_skipped: Samples of all ranks in these.
        goes_back: What takes the run back.
    """

    def __init__(
        self,
        policy: SpikePolicy,
        communicator: Communicator,
        ranks_step_together: Callable[[], bool],
        samples: Callable[[], int | None],
        tell: Callable[..., None] = lambda **values: None,
        keeper: KeepsSteps | None = None,
    ) -> None:
        self.policy = policy
        self._communicator = communicator
        self._together = ranks_step_together
        self._samples = samples
        self._tell = tell
        self._recent = {kind: RecentValues(policy.window, policy.warmup) for kind in VALUES}
        self._thresholds = {"loss": policy.loss_threshold, "gradient_norm": policy.gradient_norm_threshold}
        self.goes_back: GoesBack | None = None
        self.steps = self.batches = self.samples = 0
        self.steps_skipped = self.batches_skipped = self.samples_skipped = 0
        self._skips_in_a_row = 0
        self._keeper = keeper
        # The steps behind each checkpoint, the newest last.
        self._checkpoints: dict[str, int] = {}
        self._saved_at = 0
        # The checkpoint that was gone back to last, how many times, and up to which batch.
        self._gone_back = ("", 0, 0)
        self.forget()

    def forget(self) -> None:
        """Gradients are cleared: what was seen of them is of no step."""
        self._losses: list[tuple[torch.Tensor, torch.Tensor | float]] = []
        self._first_batch = self.batches + 1
        self._norm: torch.Tensor | None = None
        if self._keeper is not None:
            self._keeper.forget()

    def save_begins(self) -> None:
        """Note that the state of the run is being saved."""
        self._saved_at = self.steps

    def saved(self, path: str) -> None:
        """Note that this checkpoint is complete; told to rank 0, by any thread."""
        self._add(path, self._saved_at)

    def loaded(self, path: str) -> None:
        """Note that the run goes on from this checkpoint."""
        self._add(path, self.steps)

    def _add(self, path: str, steps: int) -> None:
        # What is replaced is no older one.
        self._checkpoints.pop(path, None)
        self._checkpoints[path] = steps

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | float | None) -> None:
        """Take a micro-batch's loss as ``Accelerator.backward`` gets it: 0-d, or with ``weight`` of any shape."""
        self.batches += 1
        if self._keeper is not None:
            self._keeper.backward()
        if type(loss) is not torch.Tensor or (weight is None and loss.dim()):
            # To read numbers of other kinds of tensors may be collective.
            return
        with torch.no_grad():
            if weight is None:
                self._losses.append((loss.detach(), 1.0))
                return
            weights = torch.as_tensor(weight, device=loss.device).expand_as(loss)
            self._losses.append(((loss.detach() * weights).sum(), weights.sum()))

    def clipped(self, norm: torch.Tensor) -> None:
        """Take the norm of gradients before a script clipped them, 0-d; several are of parts of them."""
        self._norm = norm if self._norm is None else torch.hypot(self._norm, norm.to(self._norm.device))

    def may_step(self, norm: Callable[[], torch.Tensor], loss_scale: Callable[[], float] | None) -> bool:
        """Return whether the step is to be made. Collective: one all-reduce of three numbers. Waits for the device.

        Args:
            norm: The norm of the averaged gradients, 0-d, for scripts that do not clip.
            loss_scale: With fp16; gradients that are not finite are then the loss scaler's, unless it is below 1.

        Raises:
            SpikeError: training is to stop, or too many steps were skipped in a row.
            UsageError: the ranks do not step together.
        """
        self.steps += 1
        self.samples += self._samples() or 0
        try:
            loss, gradient_norm = self._seen_by_all(norm)
            overflows = gradient_norm is not None and not math.isfinite(gradient_norm)
            # Such a step the loss scaler skips itself, and lowers its scale.
            is_scalers = overflows and loss_scale is not None and loss_scale() >= 1
            seen = {"loss": loss, "gradient_norm": None if is_scalers else gradient_norm}
            spike = self._worst(seen)
            if spike is not None:
                self._refuse(spike, seen)
                return False
            self._skips_in_a_row = 0
            # Only steps that are made count: a spike must not change what is usual.
            for kind, value in seen.items() if not is_scalers else ():
                if value is not None:
                    self._recent[kind].add(value)
            return True
        finally:
            self.forget()

    def _seen_by_all(self, norm: Callable[[], torch.Tensor]) -> tuple[float | None, float | None]:
        """Return the loss, a mean over ranks and micro-batches, and the norm; None: not known, or not looked at."""
        ranks = self._communicator.world_size
        if ranks > 1 and not self._together():
            raise UsageError(
                f"SpikePolicy decides for all {ranks} ranks alike, but in this run they take separate steps "
                "(LocalSGD, DiLoCo, BoundedStaleness, accelerator.alone or join_uneven_inputs). Remove the "
                "policy, or let all ranks step together."
            )
        if self._norm is None and self._thresholds["gradient_norm"] is not None:
            self._norm = norm()
        device = self._communicator.runtime.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        norm_here = torch.zeros((), dtype=dtype) if self._norm is None else self._norm
        # The norm too, so that all ranks decide by one number, to its last bit.
        row = torch.cat([self._open_loss().to(device, dtype), norm_here.to(device, dtype).view(1)])
        if ranks > 1:
            dist.all_reduce(row)
        total, weights, norms = row.tolist()
        loss = None if weights == 0 and total == 0 else total / weights if weights else math.nan
        return loss, None if self._norm is None else norms / ranks

    def _open_loss(self) -> torch.Tensor:
        """Return the sum of this rank's losses since its last step, and of their weights: [2]."""
        if not self._losses:
            return torch.zeros(2)
        device = self._losses[0][0].device
        # Python adds single numbers in a tenth of the time.
        if device.type == "cpu":
            sums = [sum(map(float, parts)) for parts in zip(*self._losses, strict=True)]
            return torch.tensor(sums, dtype=torch.float64)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        row = torch.zeros(2, dtype=dtype, device=device)
        for value, weight in self._losses:
            row[0] += value.to(device, dtype)
            row[1] += weight
        return row

    def _worst(self, seen: dict[str, float | None]) -> Spike | None:
        found = []
        for kind, value in seen.items():
            threshold = self._thresholds[kind]
            if value is None:
                continue
            if not math.isfinite(value):
                return Spike(kind, value, math.inf)
            score = None if threshold is None else self._recent[kind].score(value)
            if score is not None and threshold is not None and score > threshold:
                found.append(Spike(kind, value, score))
        return max(found, key=lambda spike: spike.score, default=None)

    def _write_capsule(self, spike: Spike, seen: dict[str, float | None], samples: int | None) -> str | None:
        """Return where the step was written down."""
        if self._keeper is None:
            return None
        history = {kind: recent.median_and_mad() for kind, recent in self._recent.items() if recent.values()}
        path, saved_at = next(reversed(self._checkpoints.items()), ("", self.steps - 1))
        return self._keeper.keep(
            BadStep(
                self.steps,
                *spike,
                loss=seen["loss"],
                gradient_norm=seen["gradient_norm"],
                history=history,
                samples=samples,
                checkpoint=path,
                steps_since=self.steps - 1 - saved_at if path else None,
                losses=[(float(value), float(weight)) for value, weight in self._losses],
            )
        )

    def _refuse(self, spike: Spike, seen: dict[str, float | None]) -> None:
        """Skip the step, go back, or stop."""
        samples = self._samples()
        # First, as long as nothing of the step is undone.
        capsule = self._write_capsule(spike, seen, samples)
        sentence = f"{_sentence(spike)} in step {self.steps}"
        if self.policy.action == "rollback":
            event = self._go_back(sentence)
        elif self.policy.action == "skip" and self._skips_in_a_row < self.policy.max_skips:
            event = self._skip(sentence, samples)
        else:
            event = {"action": "stop"}
        reason = event.pop("reason", None)
        self._tell(**spike._asdict(), sentence=f"{sentence}.", capsule=capsule, **event)
        if event["action"] == "stop":
            raise SpikeError(reason or self._why_stopped(sentence))

    def _why_stopped(self, sentence: str) -> str:
        if self.policy.action == "stop":
            return (
                f"{sentence}. No rank made this step. Look at its batches, or load the last checkpoint and go on "
                "with SpikePolicy(action='skip')."
            )
        return (
            f"{sentence}, after {self.policy.max_skips} steps in a row that were skipped for the same reason. Load "
            "the last checkpoint and lower the learning rate, or raise the thresholds."
        )

    def _skip(self, sentence: str, samples: int | None) -> dict[str, object]:
        """Skip the step on all ranks. Returns the values of the event."""
        skipped = list(range(self._first_batch, self.batches + 1))
        self._skips_in_a_row += 1
        self.steps_skipped += 1
        self.batches_skipped += len(skipped)
        self.samples_skipped += samples or 0
        if self._communicator.runtime.is_main:
            logger.warning("%s, which all ranks skip.", sentence)
        return {"action": "skip", "skipped": skipped, "samples": samples}

    def _go_back(self, sentence: str) -> dict[str, object]:
        """Undo and leave out all that was trained on since the newest whole checkpoint. Collective."""
        # From rank 0, which is told of checkpoints, to all.
        known: list[list[str]] = self._communicator.gather_object([[*reversed(self._checkpoints)]])
        paths, (before, times, until) = known[0], self._gone_back
        if not paths or self.goes_back is None:
            return {
                "action": "stop",
                "reason": (
                    f"{sentence}, and this run has neither saved nor loaded a checkpoint to go back to. No rank made "
                    "this step. Call save_state regularly, or pass SpikePolicy(action='skip')."
                ),
            }
        times = times + 1 if paths[0] == before else 1
        if times > self.policy.max_skips:
            return {
                "action": "stop",
                "reason": f"{sentence}, after going back to {before} {self.policy.max_skips} times. Load an older "
                "checkpoint and lower the learning rate, or raise the thresholds.",
            }
        # Before the load, which takes the counts back to the checkpoint's.
        left, samples = self.goes_back.leave_out(self.policy.skip_batches)
        steps, batches, all_samples = self.steps, self.batches + left, self.samples + (samples or 0)
        samples_before = self.samples_skipped
        # This brings the counts and the history of that moment.
        path = self._load_newest(self.goes_back, paths)
        # What an earlier going back has left out is not told again.
        first = max(self.batches, until) + 1
        self.steps_skipped += steps - self.steps
        self.batches_skipped += batches - self.batches
        self.samples_skipped += all_samples - self.samples
        # Steps that are undone were asked for, too.
        self.steps, self.batches, self.samples = steps, batches, all_samples
        self._gone_back = path, times, batches
        self._add(path, steps)
        if self._communicator.runtime.is_main:
            logger.warning("%s: all ranks go back to %s, and then skip these batches.", sentence, path)
        return {
            "action": "rollback",
            "skipped": list(range(first, batches + 1)),
            "samples": self.samples_skipped - samples_before,
            "checkpoint": path,
        }

    def _load_newest(self, goes_back: GoesBack, paths: list[str]) -> str:
        """Load the first of these that is there and whole; the others are forgotten. Collective."""
        for path in paths:
            try:
                goes_back.load(path)
                return path
            except CheckpointError as error:
                # Nothing was changed.
                if path == paths[-1]:
                    raise
                self._checkpoints.pop(path, None)
                if self._communicator.runtime.is_main:
                    logger.warning("Skipped %s: %s", path, error)
        raise AssertionError

    def state_dict(self) -> StateDict:
        """Return what it needs to decide as if nothing had been interrupted; ``open`` is of this rank alone."""
        is_open = self._first_batch <= self.batches
        return {
            **{name: getattr(self, name) for name in COUNTS},
            # Those of the open window are counted by the run that goes on in it from its next batch on.
            "samples": self.samples + (self._samples() or 0 if is_open else 0),
            "in_a_row": self._skips_in_a_row,
            "first_batch": self._first_batch,
            "open": self._open_loss().tolist(),
            **{kind: recent.values() for kind, recent in self._recent.items()},
        }

    def load_state_dict(self, state: StateDict | None) -> None:
        """Go on from there; None: there was no policy, and nothing is known."""
        state = {} if state is None else state
        for name in COUNTS:
            setattr(self, name, state.get(name, 0))
        self._skips_in_a_row = state.get("in_a_row", 0)
        for kind, recent in self._recent.items():
            recent.replace(state.get(kind, ()))
        self.forget()
        self._first_batch = state.get("first_batch", self.batches + 1)
        total, weights = state.get("open", (0.0, 0.0))
        if self._first_batch <= self.batches:
            self._losses.append((torch.tensor(total, dtype=torch.float64), weights))

    def load_state_dicts(self, states: list[StateDict | None], rank: int | None) -> None:
        """Load the states of all ranks that saved, as ``load_state_dict`` does; ``rank`` None: they were others."""
        own = states[0 if rank is None else rank]
        known = [state for state in states if state is not None]
        if rank is None and own is not None:
            sums = [
                sum(parts) / len(known) for parts in zip(*(state["open"] for state in known), strict=True)
            ]
            own = {**own, "open": sums}
        self.load_state_dict(own)


def _sentence(spike: Spike) -> str:
    name = "loss" if spike.kind == "loss" else "gradient norm"
    if not math.isfinite(spike.value):
        return f"The {name} is {'NaN' if math.isnan(spike.value) else 'infinite'}"
    return f"The {name} is {spike.value:.4g}, {spike.score:.1f} times its usual spread above the median,"


def check_form(state: object) -> None:
    """Raise ValueError or TypeError unless ``state`` is what ``SpikeWatch.state_dict`` returns."""
    counts = (*COUNTS, "in_a_row", "first_batch")
    if not isinstance(state, dict) or state.keys() != {*counts, *VALUES, "open"}:
        raise TypeError("spikes does not have the expected fields")
    for name in counts:
        if type(state[name]) is not int or not 0 <= state[name] < 2**48:
            raise ValueError(f"spikes.{name} is {str(state[name])[:60]!r}")
    for name in (*VALUES, "open"):
        values = state[name]
        if not isinstance(values, list) or any(type(value) not in (int, float) for value in values):
            raise TypeError(f"spikes.{name} is not a list of numbers")
        if len(values) > LARGEST_WINDOW or (name == "open" and len(values) != 2):
            raise ValueError(f"spikes.{name} has {len(values)} numbers")
        if name != "open" and not all(map(math.isfinite, values)):
            raise ValueError(f"spikes.{name} has numbers that are not finite")
