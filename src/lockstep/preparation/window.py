"""The accumulation window that is open now, as state: training goes on in the middle of it."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.comm.tree import StateDict
from lockstep.config.world import ParallelDims
from lockstep.errors import CheckpointError, UsageError
from lockstep.observe.measures.measures import Measures
from lockstep.observe.spikes.watch import SpikeWatch, check_form
from lockstep.parallel.accumulated import Accumulated, accumulated, clear, layout, places_of, put_back
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.train.accumulation import Accumulation
from lockstep.train.optimizer import PreparedOptimizer

WindowState = StateDict
"""What ``state_dict`` returned on one rank, or a part of it."""


class AccumulationState:
    """What a rank must remember to go on between two steps of an optimizer.

    Gradients are remembered from the backward that brings them to the step of their optimizer or until they are
    cleared, also where a script accumulates them by itself, without ``accumulate``. What is left of them after a
    step is not: that such gradients exist is all that is remembered.

    Where each rank has whole models, training goes on in an open window bit for bit, in a world of the same size.
    Weights and buffers, of which each rank may have its own inside of a window, are not part of it.

    Args:
        models: Prepared, in the order of the checkpoint. This and ``optimizers`` may be lists that still grow.
        axes: Of the mesh of ranks.
        gradient_size: How many ranks gradients are averaged over.
        measures: Counts the steps of the run.
        spikes: Decides by the steps before, where there is a policy.

    Attributes:
        loaded_steps: How many steps the loaded state had behind it; None: not known, or none was loaded.
    """

    def __init__(
        self,
        accumulation: Accumulation,
        models: list[ParallelModel],
        optimizers: list[PreparedOptimizer],
        axes: ParallelDims,
        gradient_size: int,
        before_load: Callable[[], None] = lambda: None,
        measures: Measures | None = None,
        spikes: SpikeWatch | None = None,
    ) -> None:
        self._accumulation = accumulation
        self._models = models
        self._optimizers = optimizers
        self._axes = axes
        self._gradient_size = gradient_size
        self._before_load = before_load
        self._measures = measures
        self._spikes = spikes
        self.loaded_steps: int | None = None

    def watch(self) -> None:
        """Notice from now on when the optimizers step; those that were watched before still are."""
        for optimizer in self._optimizers:
            self._accumulation.watch(optimizer.optimizer)

    def state_dict(self) -> WindowState:
        """Return this rank's part. Tensors are those in use: copy them before training goes on.

        ``models[i]`` has the fields of ``Accumulated``.

        Raises:
            UsageError: a model that is spread over the ranks has gradients that are not used yet.
        """
        spent, waiting = self._spent_and_waiting()
        found = [accumulated(model, spent) for model in self._models]
        for model, each in zip(self._models, found, strict=True):
            sharding = model.sharding
            is_open = sharding is not None and sharding.has_unreduced()
            if not is_open and (not each.local or (sharding is None and not self._axes.divides_weights)):
                continue
            places = places_of(model)
            if is_open or any(id(places[name]) in waiting for name in each.local):
                raise UsageError(
                    "save_state was called inside an accumulation window, where gradients are not used yet. With "
                    "zero, tp, pp or ep these cannot be saved. Save after optimizer.step() and "
                    "optimizer.zero_grad()."
                )
            # What is left belongs to parameters that no optimizer trains.
            each.local.clear()
        return {
            "window": self._accumulation.state_dict(),
            "layouts": self._layouts(),
            "models": [vars(each) for each in found],
            "steps": 0 if self._measures is None else self._measures.step,
            **({} if self._spikes is None else {"spikes": self._spikes.state_dict()}),
        }

    def places(self) -> list[str]:
        """Return the names of the parameters that this rank has, each behind the number of its model."""
        return [f"{i}.{name}" for i, model in enumerate(self._models) for name in places_of(model)]

    def check(self, states: list[WindowState]) -> None:
        """See whether ``load_state_dicts`` can load these; changes nothing, and holds no collective.

        Raises:
            CheckpointError: they are of other models, or of another window than this run can go on with.
        """
        if not states:
            raise CheckpointError(
                "The checkpoint has no state of an accumulation window. Load another checkpoint."
            )
        for rank, state in enumerate(states):
            if "spikes" in state:
                _check_spikes(state["spikes"])
            if len(state["models"]) != len(self._models):
                raise CheckpointError(
                    f"The checkpoint has gradients of {len(state['models'])} models (rank {rank}), but "
                    f"{len(self._models)} are prepared. Prepare the same models in the same order."
                )
            self._accumulation.check_state(state["window"])
        unchanged = self.is_unchanged(states)
        for i, model in enumerate(self._models):
            shapes = {name: tuple(place.shape) for name, place in places_of(model).items()}
            for saved in (Accumulated(**state["models"][i]) for state in states):
                if saved.reduced or saved.partial or (saved.local and not unchanged):
                    raise CheckpointError(
                        "The checkpoint was saved inside an accumulation window, by other ranks or a sharded model. "
                        "Load it with as many ranks and the same 'parallel', or load one from the end of a window."
                    )
                _check_names(saved, shapes, type(model.module).__name__)

    def load_state_dicts(self, states: list[WindowState], rank: int) -> None:
        """Go on in the window that was saved, or outside of one; what this run had accumulated is forgotten.

        The tensors are copied.

        Args:
            states: What ``state_dict`` returned on each rank that saved, in their order. If ``is_unchanged``,
                tensors of other ranks are not read.
            rank: Of this process.

        Raises:
            CheckpointError: see ``check``; nothing was changed then.
        """
        self.check(states)
        self._before_load()
        unchanged = self.is_unchanged(states)
        own = states[rank if unchanged else 0]
        self.loaded_steps = own.get("steps")  # not in files of earlier versions
        if self._spikes is not None:
            self._spikes.load_state_dicts(
                [state.get("spikes") for state in states], rank if unchanged else None
            )
        for model, saved in zip(self._models, own["models"], strict=True):
            clear(model)
            put_back(model, Accumulated(**saved))
        self._accumulation.load_state_dict(own["window"])

    def is_unchanged(self, states: list[WindowState]) -> bool:
        """Return whether as many ranks with models spread alike saved these; each then needs its own tensors only."""
        layouts = self._layouts()
        agreed = self._accumulation.state_dict()["agreed_divisor"]
        return len(states) == self._gradient_size and all(
            state["layouts"] == layouts and state["window"]["agreed_divisor"] == agreed for state in states
        )

    def _layouts(self) -> list[str]:
        sizes = [
            f"{name}={size}" for name in ("pp", "cp", "tp", "ep") if (size := getattr(self._axes, name)) > 1
        ]
        return [" ".join([*sizes, layout(model)]) for model in self._models]

    def _spent_and_waiting(self) -> tuple[set[int], set[int]]:
        """Return the ``id`` of each parameter on which all of its optimizers have stepped since the last backward, and
        of each on which one of them has not."""
        spent: set[int] = set()
        waiting: set[int] = set()
        for optimizer in (prepared.optimizer for prepared in self._optimizers):
            parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            (spent if self._accumulation.has_stepped(optimizer) else waiting).update(parameters)
        return spent - waiting, waiting


def _check_spikes(state: object) -> None:
    try:
        check_form(state)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"The state of SpikePolicy in the checkpoint is not valid ({error}). Load another checkpoint."
        ) from error


def _check_names(saved: Accumulated, shapes: dict[str, tuple[int, ...]], model: str) -> None:
    for name, shape in saved.shapes():
        if name not in shapes:
            raise CheckpointError(
                f"The checkpoint has a gradient of '{name}', but {model} has no parameter of this name. Prepare "
                "the model that was saved."
            )
        if shape not in (None, shapes[name]):
            raise CheckpointError(
                f"The checkpoint's gradient of '{name}' has shape {shape}, but the parameter of {model} has "
                f"{shapes[name]}. Prepare the model that was saved."
            )
