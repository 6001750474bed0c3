"""Put the state of a checkpoint into the objects of a run: first look at everything, then change anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from lockstep.checkpoint.checks import check_buffers, check_rng, check_scaler, check_scheduler, try_scheduler
from lockstep.checkpoint.contents import AccumulationWindow, CheckpointContents, Stateful
from lockstep.checkpoint.format.codec import Document, encode, tensor_names
from lockstep.checkpoint.global_state import GlobalNames
from lockstep.checkpoint.optimizer_state import OptimizerPlaces
from lockstep.checkpoint.reader import Checkpoint, ReadItem, create_read_items, create_read_items_as
from lockstep.checkpoint.saved_ranks import Sources, decoded, plan_window
from lockstep.checkpoint.state import ParameterNames, is_extra, memory_key
from lockstep.comm.dtensor import is_dtensor
from lockstep.errors import CheckpointError, LockstepError
from lockstep.runtime.seed import set_rng_state


@dataclass
class LoadPlan:
    """What will be put where. Nothing of the run has been changed; ``apply`` changes it."""

    checkpoint: Checkpoint
    left: list[str] = field(default_factory=list)
    items: list[ReadItem] = field(default_factory=list)
    models: list[tuple[int, nn.Module, dict[str, object]]] = field(default_factory=list)
    loaders: list[tuple[Stateful, Document]] = field(default_factory=list)
    waiting: list[Document] = field(default_factory=list)
    keep_waiting: Callable[[list[Document]], None] | None = None
    states: list[tuple[Stateful, Document]] = field(default_factory=list)
    objects: list[tuple[Stateful, Document]] = field(default_factory=list)
    window: tuple[AccumulationWindow, list[Document], int] | None = None
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    rng: Document | None = None

    def apply(self) -> None:
        """Change the run. The user's objects come last: their ``load_state_dict`` may count on loaded models."""
        for item, state in self.loaders:
            _load(item, state)
        if self.keep_waiting is not None:
            self.keep_waiting(self.waiting)
        self.checkpoint.read(self.items)
        for number, model, state in self.models:
            # The state has the first rank's buffers: where they differed, this rank's own go over them.
            state.update(
                {
                    name: self.buffers[full]
                    for name in state
                    if (full := f"model.{number}.{name}") in self.buffers
                }
            )
            model.load_state_dict(state, strict=False)
        for item, state in (*self.states, *self.objects):
            _load(item, state)

    def open_window(self) -> None:
        """Go on in the accumulation window, and with the generators, once ``apply`` is done on all ranks.

        Collective for sharded models.
        """
        if self.window is not None:
            item, states, rank = self.window
            item.load_state_dicts(states, rank)
        if self.rng is not None:
            set_rng_state(self.rng)


def create_load_plan(
    checkpoint: Checkpoint,
    contents: CheckpointContents,
    models: list[nn.Module],
    rank: int,
    world_size: int,
    everywhere: GlobalNames,
) -> LoadPlan:
    """Look at everything, and read all but weights and optimizer states, which go straight to their places.

    ``models`` are those that no hook has loaded, ``everywhere`` what all ranks together want.

    Raises:
        CheckpointError: the checkpoint is of another set of objects, or of other names or shapes.
    """
    state = checkpoint.state()
    plan = LoadPlan(checkpoint, keep_waiting=contents.keep_waiting)
    # Other formats hold less.
    if "imported" in state:
        there = dict(state.get("contents") or {})
        plan.left = [kind for kind in contents.counts() if kind not in there]
        contents = contents.only(there)
    _check_contents(checkpoint, state, contents)
    sources = Sources(checkpoint, rank, world_size, contents.place)
    own = checkpoint.of_rank(sources.rank)
    for number, model in enumerate(contents.models):
        if any(model is other for other in models):
            _plan_model(plan, model, number, state["models"], contents, everywhere.models[str(number)])
    names = ParameterNames(contents.models, {number: whole.ties for number, whole in contents.whole.items()})
    for name, optimizer in contents.stateful("optimizer"):
        document, groups = _section(checkpoint, state, name), names.by_group(optimizer)
        wanted = everywhere.optimizers[name]
        places = OptimizerPlaces(document, optimizer, groups, checkpoint.index, name, wanted)
        plan.items += create_read_items(places.tensors, checkpoint.index)
        plan.states.append((optimizer, places.state_dict()))
        places.check_step(checkpoint.whole(places.small(checkpoint.index)))
    for name, item in contents.stateful("scheduler"):
        plan.states.append((item, decoded(checkpoint, _section(checkpoint, state, name))))
        check_scheduler(plan.states[-1][1], item, name)
        try_scheduler(item, plan.states[-1][1], name)
    for name, item in contents.stateful("scaler"):
        plan.states.append((item, decoded(checkpoint, _section(checkpoint, state, name))))
        check_scaler(plan.states[-1][1], item, name)
    for name, item in contents.stateful("loader"):
        plan.loaders.append((item, decoded(checkpoint, _section(checkpoint, own, name))))
        item.check_state_dict(plan.loaders[-1][1])
    for number in range(len(plan.loaders), dict(state.get("contents") or {}).get("loader", 0)):
        plan.waiting.append(decoded(checkpoint, _section(checkpoint, own, f"loader.{number}")))
    for name, item in contents.stateful("object"):
        document = _section(checkpoint, own, name)
        plan.objects.append(
            (item, decoded(checkpoint, document, _sharded_in(item, name, document, world_size)))
        )
    for name, item in contents.stateful("window"):
        plan.window = _plan_window(checkpoint, item, name, sources, set(contents.whole))
    # With other ranks no state is this rank's: generators stay as they are, and buffers are the first rank's.
    if sources.same_world and sources.has_own and ("imported" not in state or "rng" in own):
        plan.rng = decoded(checkpoint, _section(checkpoint, own, "rng"))
        check_rng(plan.rng, checkpoint.root)
        plan.buffers = decoded(checkpoint, own.get("buffers", {}))
        check_buffers(plan.buffers, _tensors_of(plan.models), checkpoint.root)
    # The headers of all files, before ``apply``: a failure after that leaves a run that is half loaded.
    checkpoint.check(plan.items)
    return plan


def _plan_window(
    checkpoint: Checkpoint, item: AccumulationWindow, name: str, sources: Sources, spread: set[int]
) -> tuple[AccumulationWindow, list[Document], int] | None:
    try:
        return plan_window(checkpoint, item, name, sources, spread)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{checkpoint.root} has an accumulation window that is not valid ({type(error).__name__}: "
            f"{error}). Load another checkpoint."
        ) from error


def _section(checkpoint: Checkpoint, document: Document, name: str) -> Document:
    if name not in document:
        raise CheckpointError(f"{checkpoint.root} has no state of {name}. Load another checkpoint.")
    return document[name]


def _tensors_of(models: list[tuple[int, nn.Module, dict[str, object]]]) -> dict[str, torch.Tensor]:
    return {
        f"model.{number}.{name}": value
        for number, _, state in models
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def _load(item: Stateful, state: Document) -> None:
    try:
        item.load_state_dict(state)
    except LockstepError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"A {type(item).__name__} refused its state ({type(error).__name__}: {error}), after objects before it "
            "were loaded. Load another checkpoint, or mend its load_state_dict."
        ) from error


def _check_contents(checkpoint: Checkpoint, state: Document, contents: CheckpointContents) -> None:
    saved, mine = dict(state.get("contents") or {}), contents.counts()
    # A loader may be prepared later.
    later = (
        "loader" in saved and contents.keep_waiting is not None and mine.get("loader", 0) < saved["loader"]
    )
    if saved != (mine | {"loader": saved["loader"]} if later else mine):
        raise CheckpointError(
            f"{checkpoint.directory} holds {_contents_text(saved)}, but this run has {_contents_text(mine)}. "
            "Prepare and register the same objects in the same order as the run that saved it."
        )


def _contents_text(contents: Mapping[str, int] | None) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in dict(contents or {}).items()) or "nothing"


def _plan_model(
    plan: LoadPlan,
    model: nn.Module,
    number: int,
    saved_models: Document,
    contents: CheckpointContents,
    everywhere: set[str],
) -> None:
    what = f"{plan.checkpoint.directory} does not fit {type(model).__name__}"
    document = saved_models.get(str(number))
    if document is None:
        raise CheckpointError(
            f"{what}: when it was saved, a hook removed the weights of model {number} from it. Register the hook "
            "that loads them."
        )
    prefix = f"model.{number}."
    saved = {name.removeprefix(prefix) for name in plan.checkpoint.index if name.startswith(prefix)}
    # Of a sharded model, this lets gathered parameters go.
    state = model.state_dict()
    places = {
        name: value for name, value in state.items() if isinstance(value, torch.Tensor) and not is_extra(name)
    }
    sources = {name: name for name in places if name in saved}
    tied_here = _ties(places)
    for name in places:
        # Another rank's block may have its first name.
        if not saved & tied_here[name]:
            others = sorted(saved & contents.whole_of(number).names_of(name))
            sources.update((name, other) for other in others[:1])
    absent = sorted(n for n in places if n not in sources and not saved & tied_here[n])
    unknown = sorted(saved - places.keys() - everywhere)
    if absent or unknown:
        raise CheckpointError(
            f"{what}: tensors {absent[:3]} are missing from it, and {unknown[:3]} are not in the model. Load it into "
            "the model that it was saved from."
        )
    try:
        plan.items += create_read_items_as(
            {prefix + name: (prefix + source, places[name]) for name, source in sources.items()},
            plan.checkpoint.index,
        )
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from error
    for name, value in document["extra"].items():
        # Of a block on another rank.
        if name not in state and name in everywhere:
            continue
        if name not in state or name in places:
            raise CheckpointError(
                f"{what}: it has {name} as no tensor, unlike the model. Load it into the model that it was saved from."
            )
        state[name] = decoded(plan.checkpoint, value)
    plan.models.append((number, model, state))


def _ties(places: dict[str, torch.Tensor]) -> dict[str, set[str]]:
    """Return for each name all names of tensors at the same place."""
    names: dict[object, set[str]] = {}
    for name, tensor in places.items():
        # Empty tensors have no memory by which a tie could be seen.
        names.setdefault(memory_key(tensor) if tensor.numel() else name, set()).add(name)
    return {name: tied for tied in names.values() for name in tied}


def _sharded_in(item: Stateful, name: str, document: Document, world_size: int) -> dict[str, torch.Tensor]:
    """Return the DTensors that an object holds now, by the names under which they are saved."""
    # Not asked without need: a state that is asked for is the next iteration of torchdata's nodes.Loader.
    if world_size == 1 or not tensor_names(document):
        return {}
    tensors: dict[str, torch.Tensor] = {}
    encode(item.state_dict(), tensors, name)
    return {path: tensor for path, tensor in tensors.items() if is_dtensor(tensor)}
