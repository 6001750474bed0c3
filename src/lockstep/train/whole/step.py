"""An optimizer whose parameters are sharded, and which steps on whole ones.

Of an optimizer that treats every element by itself the step on shards is that on the whole. Any other, such as one
that divides by the norm of a parameter, gets the whole: before a step every rank gathers parameters, gradients and
state, makes the same step as one process would, and keeps its shards of what came of it. Nothing of a step that
raised is kept.

    outside of a step      param_groups, state: sharded (DTensors), as the model's parameters are
    in a step              the same lists and dicts hold whole tensors
    in a closure           sharded parameters again, with the values and gradients of the moment

References in attributes of the optimizer to parameters from before ``prepare`` hold whole ones in a step, and empty
ones outside of it. References to shards are refused when a step uses them.
"""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lockstep.comm.dtensor import is_dtensor, max_over_shards
from lockstep.comm.tree import Args, Kwargs
from lockstep.errors import UsageError
from lockstep.torch_internals import optim as torch_optim
from lockstep.torch_internals.dispatch import TorchFunction
from lockstep.train.whole.kinds import line_of_step
from lockstep.train.whole.tensors import WholeParameter, cut_state, gather_state, tensors_of


class WholeStep:
    """Runs methods of one optimizer on whole parameters. See ``step_on_whole``."""

    def __init__(self, optimizer: Optimizer, before_gathering: Callable[[], None]) -> None:
        self.optimizer = optimizer
        self._before_gathering = before_gathering
        self._own_step: object = vars(optimizer).pop("step", None)
        self._originals: dict[int, nn.Parameter] = {}
        self._by_shard: dict[int, WholeParameter] = {}
        self._by_whole: dict[int, WholeParameter] = {}
        self._before: list[tuple[dict[object, object], dict[object, object]]] = []
        self._generators, self._draws_alike = 0, True
        self._guard = _NoShards(self)
        self._runs = self._is_suspended = False

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__

    @property
    def runs(self) -> bool:
        """Whether the optimizer is in a step now, and not in its closure."""
        return self._runs and not self._is_suspended

    @property
    def is_at_work(self) -> bool:
        """Whether one of its methods runs now, or the closure of one."""
        return self._runs

    def add(self, originals: Mapping[int, nn.Parameter]) -> None:
        """Take note that parameters were replaced, or are known for the first time."""
        self._originals.update(originals)
        self._find_wholes()

    def _find_wholes(self) -> None:
        for parameter in tensors_of(self.optimizer.param_groups):
            if is_dtensor(parameter) and id(parameter) not in self._by_shard:
                whole = WholeParameter(parameter, self._originals.get(id(parameter)))
                self._by_shard[id(parameter)] = self._by_whole[id(whole.whole)] = whole

    def step(self, unhooked: bool, cls: type[Optimizer], *args: object, **kwargs: object) -> object:
        torch_optim.note_step(self.optimizer)
        step: Any = self._own_step
        if step is None:
            function: Any = torch_optim.step_without_hooks(cls) if unhooked else cls.step
            step = function.__get__(self.optimizer)
        return self.run(step, *args, **kwargs)

    def run(self, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Run ``method(...)`` with whole parameters. Collective."""
        if self.runs:
            return method(*args, **kwargs)
        # Suspended: its own closure calls it again, whose step would begin within this one.
        if self._runs:
            raise UsageError(
                f"The closure that {self.name}.step got calls {self.name}.{getattr(method, '__name__', 'step')}. "
                "Let the closure compute only the loss and its gradients."
            )
        args, kwargs = tuple(map(self._suspending, args)), {k: self._suspending(v) for k, v in kwargs.items()}
        self._begin()
        try:
            with self._guard:
                result = method(*args, **kwargs)
            self._end()
        except BaseException:
            # Half of a step must not reach the shards, so the state is put back as it was before.
            self._discard()
            raise
        return result

    def _suspending(self, argument: object) -> object:
        """Return an argument; a closure runs the model, on shards."""
        if not callable(argument) or isinstance(argument, (torch.Tensor, nn.Module, type)):
            return argument

        @functools.wraps(argument, updated=())
        def closure(*args: object, **kwargs: object) -> object:
            if not self.runs:
                return argument(*args, **kwargs)
            with self.suspended():
                return argument(*args, **kwargs)

        return closure

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let the optimizer hold shards inside of a step. What raises there ends the step. Collective."""
        self._suspend()
        yield
        self._resume()

    # The parts of a step -------------------------------------------------------------------------------

    @torch.no_grad()
    def _begin(self) -> None:
        self._before_gathering()
        self._find_wholes()
        # Compared before anything is gathered: ranks with different lists would wait for each other for ever.
        wholes = self._current_parameters()
        for whole, has_gradient in zip(wholes, self._compare(wholes), strict=True):
            whole.gather(has_gradient)
        self._before = [(values, dict(values)) for values in self._states()]
        for whole in wholes:
            values = self.optimizer.state.get(whole.sharded)
            if isinstance(values, dict):
                gather_state(values)
        self._exchange(to_whole=True)
        self._rename_state(to_whole=True)
        self._runs = True

    @torch.no_grad()
    def _suspend(self) -> None:
        self._guard.__exit__(None, None, None)
        self._is_suspended = True
        for whole in self._current_parameters():
            whole.write_back()
        self._exchange(to_whole=False)

    @torch.no_grad()
    def _resume(self) -> None:
        self._before_gathering()
        wholes = self._current_parameters()
        # What the closure drew, as dropout does, is each rank's own.
        for whole, has_gradient in zip(wholes, self._compare(wholes), strict=True):
            whole.gather(has_gradient)
        self._exchange(to_whole=True)
        self._is_suspended = False
        self._guard.__enter__()

    @torch.no_grad()
    def _end(self) -> None:
        self._check_draws()
        wholes = self._current_parameters()
        for whole in wholes:
            whole.write_back()
        # It holds state, too, which ``cut`` would take for used elsewhere.
        self._before = []
        for whole in wholes:
            values = self.optimizer.state.get(whole.whole)
            if isinstance(values, dict):
                cut_state(whole, values)
        self._shard_again()

    @torch.no_grad()
    def _discard(self) -> None:
        if self._is_suspended:
            # Leaving the step takes it off once more.
            self._guard.__enter__()
        known = {id(values) for values, _ in self._before}
        state = self.optimizer.state
        for key in [
            key for key, values in state.items() if isinstance(values, dict) and id(values) not in known
        ]:
            del state[key]
        for values, before in self._before:
            values.clear()
            values.update(before)
        self._shard_again()

    def _shard_again(self) -> None:
        self._rename_state(to_whole=False)
        self._exchange(to_whole=False)
        self._runs = self._is_suspended = False
        self._before = []
        for whole in self._current_parameters():
            whole.release()

    # -----------------------------------------------------------------------------------------------------

    def _current_parameters(self) -> list[WholeParameter]:
        """Return the parameters of now, in order."""
        found = []
        for parameter in tensors_of(self.optimizer.param_groups):
            whole = self._by_shard.get(id(parameter)) or self._by_whole.get(id(parameter))
            if whole is not None:
                found.append(whole)
        return found

    def _states(self) -> list[dict[object, object]]:
        return [values for values in self.optimizer.state.values() if isinstance(values, dict)]

    def _exchange(self, to_whole: bool) -> None:
        for group in self.optimizer.param_groups:
            group["params"][:] = [self._exchanged(parameter, to_whole) for parameter in group["params"]]

    def _exchanged(self, parameter: torch.Tensor, to_whole: bool) -> torch.Tensor:
        if to_whole:
            whole = self._by_shard.get(id(parameter))
            return parameter if whole is None else whole.whole
        whole = self._by_whole.get(id(parameter))
        return parameter if whole is None else whole.sharded

    def _rename_state(self, to_whole: bool) -> None:
        state = self.optimizer.state
        items = [(self._exchanged(key, to_whole), values) for key, values in state.items()]
        state.clear()
        state.update(items)

    def _compare(self, wholes: list[WholeParameter]) -> list[bool]:
        """Return which parameters have a gradient on any rank. Collective.

        Ranks that are about to gather different tensors would mix them up, or wait for ever.
        """
        layout = []
        for whole in wholes:
            state = self.optimizer.state.get(whole.sharded, {})
            layout.append(
                isinstance(state, dict) and sorted(str(k) for k, value in state.items() if is_dtensor(value))
            )
        shapes = [tuple(whole.sharded.shape) for whole in wholes]
        self._generators = _digest_of_generators()
        mine = torch.tensor([zlib.crc32(repr((shapes, layout)).encode()), self._generators])
        # All ranks have as many parameters: ``prepare`` has compared the models.
        have = torch.tensor([int(w.sharded.grad is not None) for w in wholes], dtype=torch.int64)
        numbers = max_over_shards(torch.cat([mine, -mine, have]), [whole.sharded for whole in wholes])
        # The maximum of the negated numbers is the negated minimum: equal only if all numbers are.
        is_same, draws_alike = (numbers[:2] == -numbers[2:4]).tolist()
        self._draws_alike = draws_alike
        if not is_same:
            raise UsageError(
                f"{self.name} steps on whole parameters, but the ranks do not have state of the same parameters. Let "
                "every rank make the same steps."
            )
        return [bool(number) for number in numbers[4:].tolist()]

    def _check_draws(self) -> None:
        if not self._draws_alike and _digest_of_generators() != self._generators:
            raise UsageError(
                f"{self.name} draws random numbers in its step, and the ranks' "
                "generators differ, so their parts of the model would not fit together. Seed all ranks alike before "
                "the step, as set_seed(seed) does, or draw from a torch.Generator of the optimizer's own."
            )


def _digest_of_generators() -> int:
    """Return a number of the states of Python's, NumPy's, torch's and the accelerator's global generators."""
    accelerator = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else b""
    state = repr(random.getstate()).encode() + np.random.get_state()[1].tobytes()  # type: ignore[index]
    return zlib.crc32(state + torch.get_rng_state().numpy().tobytes() + accelerator)


class _NoShards(TorchFunctionMode):
    """In a step on whole parameters a shard can only be a mistake: what is computed of one is this rank's alone."""

    def __init__(self, whole: WholeStep) -> None:
        super().__init__()
        self._whole = whole

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if any(map(_has_dtensor, args)) or any(map(_has_dtensor, kwargs.values())):
            optimizer = self._whole.optimizer
            raise UsageError(
                f"{type(optimizer).__name__} uses a sharded parameter that is not in its param_groups, or a "
                f"reference to one that it holds elsewhere ({line_of_step(optimizer)}). Its step would use the "
                "part of one rank as if it were the whole. Read parameters from self.param_groups, or make the "
                "optimizer before prepare."
            )
        return func(*args, **kwargs)


def _has_dtensor(argument: object) -> bool:
    if isinstance(argument, (list, tuple)):
        return any(map(is_dtensor, argument))
    return isinstance(argument, torch.Tensor) and is_dtensor(argument)
