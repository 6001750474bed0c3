"""A replica that goes on averaging when training changes what it averages: torch's DDP settles that once, at the start.

DDP's reducer averages the parameters that were trainable when it was made, once after each forward. A replica looks at
its module in each forward, and lets another reducer take over where other parameters are trainable now; and it lets
the reducer average again where several backward calls follow one forward, or none, as where a script calls the module
inside of the replica, or parts of it.
"""

from __future__ import annotations

import operator
import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from lockstep.comm.tree import Kwargs, StateDict, tensor_leaves
from lockstep.errors import UsageError
from lockstep.model.changes import attributes_set
from lockstep.parallel.ddp.consistency import guard_hooks, most_apart
from lockstep.torch_internals.autograd import at_end_of_backward as at_end_of_pass
from lockstep.torch_internals.autograd import current_backward as current_pass
from lockstep.torch_internals.autograd import leaves_of
from lockstep.torch_internals.c10d import check_reduced, is_joining, rebuild_buckets
from lockstep.torch_internals.modules import every_parameter
from lockstep.torch_internals.optim import stepped_by

MOST_REDUCERS = 4
"""Kept for parts that are trained in turn. Each has buffers as large as the gradients that it averages."""


@dataclass(frozen=True)
class _AveragedReducer:
    """A reducer of torch's with the parameters that it averages."""

    reducer: Any
    logger: object
    parameters: list[nn.Parameter]


class DistributedDataParallel(TorchDDP):
    """torch's DDP that follows its module, and whose missing attributes are looked up in the module.

    Args:
        options: Of ``TorchDDP``.
        configure: Called with each new DDP of this module, before it is used. Collective.
    """

    def __init__(
        self, module: nn.Module, options: Kwargs, configure: Callable[[TorchDDP], None] = lambda _: None
    ) -> None:
        super().__init__(module, **options)
        self._options = options
        self._configure = configure
        self._trained = trained_parameters(module)
        self._averaged = {_key(self._trained): _AveragedReducer(self.reducer, self.logger, self._trained)}
        # The reducer averages in the next backward that brings it gradients.
        self._is_armed = self._is_spent = False
        self._has_own = False
        self._pass = -1
        self._steps = 0
        configure(self)

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __getstate__(self) -> StateDict:
        return {**super().__getstate__(), "_averaged": {}}

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the forward as DDP does.

        Raises:
            UsageError: the last backward left out parameters on this rank.
        """
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        self.check_reduced()
        if not self._follow_module():
            # torch would prepare the reducer, which then averages in the next backward, also in that of no_sync.
            with attributes_set(self, require_backward_grad_sync=False):
                return super().forward(*args, **kwargs)
        output = super().forward(*args, **kwargs)
        if not self.require_backward_grad_sync:
            self._notice_own_gradients(output)
        elif not self.static_graph:
            self._is_armed, self._is_spent = True, False
            self._average_again_if_spent(output)
        return output

    def average_gradients_of(self, loss: torch.Tensor) -> None:
        """Let the next backward, that of this loss, average, also if no forward of the replica came before it.

        Raises as ``forward``. Collective where the loss depends on parameters of the module.
        """
        is_armed, self._is_armed = self._is_armed and not self._is_spent, False
        syncs = self.require_backward_grad_sync
        if is_armed or (self._has_own and not syncs) or self.static_graph or is_joining(self):
            return
        # Only where no forward made the reducer ready, since to walk through the graph takes about 1 µs a node.
        trained = set(map(id, trained_parameters(self.module)))
        if not any(id(leaf) in trained for leaf in leaves_of(loss)):
            return
        if not syncs:
            self._has_own = True
        elif self._follow_module():
            self._prepare_again([loss])
            self._is_spent = self._has_own = False

    def synchronised(self) -> AbstractContextManager[None]:
        """Forward and backward inside are those of a micro-batch whose gradients are averaged, also in ``no_sync``."""
        return attributes_set(self, require_backward_grad_sync=True, require_forward_param_sync=True)

    def without_buffers(self) -> AbstractContextManager[None]:
        """Let forwards inside not take rank 0's buffers, so that ranks need not come to as many of them."""
        return attributes_set(self, require_forward_param_sync=False)

    def check_reduced(self) -> None:
        """Raise UsageError if a backward left out parameters that the other ranks wait for."""
        try:
            check_reduced(self.reducer)
        except RuntimeError as error:
            rank = torch.distributed.get_rank(self.process_group)
            raise UsageError(
                f"Backward on rank {rank} left {self._left_out(str(error))} of {type(self.module).__name__} "
                "without a gradient, which parallel='ddp' averages over the ranks. Pass "
                "DistributedDataParallelKwargs(find_unused_parameters=True) to the Accelerator, or freeze on "
                "all ranks the parameters that are not used. Add up several losses of one forward, and call "
                "backward once."
            ) from error

    def check_averaged(self, optimizer: Optimizer, compares_copies: bool = True) -> None:
        """Raise UsageError if the ranks' gradients differ before a step, or copies of their parameters.

        This is asked where every backward since the last step was one of ``no_sync``; and in the first step, the
        second, the fourth, the eighth, and so on, for gradients that no reducer has seen, and for steps that used
        numbers of a rank's own. Collective then.
        """
        self._steps += 1
        # A power of two has one bit.
        if not self._has_own and self._steps & (self._steps - 1):
            return
        if is_joining(self) or not self._trained or stepped_by(optimizer).isdisjoint(map(id, self._trained)):
            return
        has_own, self._has_own = self._has_own, False
        # Those that a rank lacks have a place, too: all send as many numbers.
        found = [
            torch.zeros_like(p) if p.grad is None or p.grad.layout is not torch.strided else p.grad
            for p in self._trained
        ]
        differing = most_apart([*found, *(self._trained if compares_copies else [])], self.process_group)
        if differing is None:
            return
        kind = type(self.module).__name__
        if has_own:
            raise UsageError(
                f"The step would use gradients of {kind} from this rank only, because each backward since the last "
                "step ran inside no_sync. Run the last forward and backward before a step outside no_sync, which "
                "averages the accumulated gradients."
            )
        names = {id(p): name for name, p in self.module.named_parameters()}
        number = differing % len(self._trained)
        name = names.get(id(self._trained[number]), "?")
        if number != differing:
            raise UsageError(
                f"'{name}' of {kind} is no longer equal on all ranks. A forward, a hook or an optimizer step changed "
                "it by numbers of one rank only, such as its rows or its random numbers. Average them first: "
                "accelerator.reduce(tensor, 'mean'), or draw them from a torch.Generator with an equal seed."
            )
        raise UsageError(
            f"The gradient of '{name}' of {kind} is not equal on all ranks, so this step would let them drift "
            "apart. Such are gradients of loss.backward() on what is no output of the prepared model, and of "
            "torch.autograd.grad. So are those of a checkpoint with use_reentrant=True around the model, and those "
            "that the script changed by numbers of this rank's rows. Call accelerator.backward(loss) and "
            "use_reentrant=False, or average what you set: p.grad = accelerator.reduce(gradient, 'mean')."
        )

    def mark_used(self, parameters: Sequence[torch.Tensor]) -> None:
        """Let gradients of these parameters be averaged although no backward has brought them. Clears them first.

        With ``find_unused_parameters`` DDP leaves alone what no backward has used since it last averaged; gradients
        that were loaded would then stay as each rank has them.
        """
        if not self.find_unused_parameters or self.static_graph:
            return
        used = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in used:
            parameter.grad = None
        torch.autograd.backward(used, [torch.zeros_like(parameter) for parameter in used])

    def _notice_own_gradients(self, output: object) -> None:
        for tensor in tensor_leaves(output).values():
            if tensor.requires_grad:
                tensor.register_hook(partial(_call, weakref.WeakMethod(self.own_gradients_come)))

    def own_gradients_come(self, _: torch.Tensor) -> None:
        """Note that a backward has come to an output of a forward in ``no_sync``."""
        self._has_own = not self.require_backward_grad_sync

    def _left_out(self, message: str) -> str:
        """torch says it by number: "Parameter indices which did not receive grad for rank 1: 4 5"."""
        found = re.search(r"for rank \d+: ([\d ]+)", message)
        numbers = [int(number) for number in found[1].split()] if found else []
        # In the order in which torch numbers them.
        parameters = (p for module in self.module.modules() for p in module.parameters(recurse=False))
        unique = list(dict.fromkeys(p for p in parameters if p.requires_grad))
        names = {id(p): name for name, p in self.module.named_parameters()}
        out = [names.get(id(unique[n]), "?") for n in numbers if n < len(unique)]
        if not out:
            return "parameters"
        return f"{len(out)} parameters ('{out[0]}'{', ...' if len(out) > 1 else ''})"

    def _follow_module(self) -> bool:
        """Let a reducer of the parameters that are trainable now take over; False: there are none.

        Collective where the reducer is a new one.
        """
        now = trained_parameters(self.module)
        guard_hooks(self, now)
        if not now:
            return False
        if len(now) == len(self._trained) and all(map(operator.is_, now, self._trained)):
            return True
        # A script may take submodules off and put them back on one rank only: the first order stays.
        if _key(now) == _key(self._trained):
            return True
        if self.static_graph:
            raise UsageError(
                f"Other parameters of {type(self.module).__name__} are trainable than in the step before, but "
                "static_graph=True promises that they never change. Drop static_graph."
            )
        known = self._averaged.pop(_key(now), None)
        if not self._is_spent or self.find_unused_parameters:
            # It waits for gradients that may never come, or remembers which parameters were used.
            self._averaged.pop(_key(self._trained), None)
        if known is None:
            known = self._another(now)
        self._averaged[_key(now)] = known
        # Those in use were put in again behind the others, so the first is the one unused for longest.
        while len(self._averaged) > MOST_REDUCERS:
            self._averaged.pop(next(iter(self._averaged)))
        self.reducer, self.logger, self._trained = known.reducer, known.logger, now
        self._module_parameters = list(nn.Module.parameters(self.module))
        return True

    def _another(self, trained: list[nn.Parameter]) -> _AveragedReducer:
        first, now = (
            list(map(id, some)) for some in (self._module_parameters, nn.Module.parameters(self.module))
        )
        if [one for one in first if one in now] != [one for one in now if one in first]:
            raise UsageError(
                f"Other parameters of {type(self.module).__name__} are trainable than in the step before, and they "
                "stand in another order than in prepare(), as after 'del model.part' and 'model.part = part'. Another "
                "rank may have them in another order. Prepare the model again after such a change."
            )
        has_new = not set(now) <= set(first)
        # Added parameters must take rank 0's values; all others are equal already.
        other = TorchDDP(self.module, **self._options, init_sync=has_new)
        self._configure(other)
        return _AveragedReducer(other.reducer, other.logger, trained)

    def _average_again_if_spent(self, output: object) -> None:
        tensors = [tensor for tensor in tensor_leaves(output).values() if tensor.requires_grad]
        outputs = [weakref.ref(tensor) for tensor in tensors]
        for tensor in tensors:
            tensor.register_hook(partial(_call, weakref.WeakMethod(self.backward_begins), outputs))

    def backward_begins(self, outputs: list[weakref.ref[torch.Tensor]], _: torch.Tensor) -> None:
        """Note that a backward has come to an output of this module. The first since its forward is DDP's business."""
        if self.require_backward_grad_sync:
            self._has_own = False
        number = current_pass()
        # One backward may come to several outputs.
        if number == self._pass:
            return
        self._pass = number
        self._leave_frozen_alone()
        if self._is_spent and self.require_backward_grad_sync:
            self._prepare_again([tensor for ref in outputs if (tensor := ref()) is not None])
        self._is_spent = True

    def _prepare_again(self, roots: list[torch.Tensor]) -> None:
        self.check_reduced()
        # After its first averaging a reducer forms its buckets anew: otherwise in the next forward.
        self._has_rebuilt_buckets = rebuild_buckets(self.reducer) or self._has_rebuilt_buckets
        # An average of equal numbers is that number, so that what was averaged may be averaged again.
        self.reducer.prepare_for_backward(roots if self.find_unused_parameters else [])

    def _leave_frozen_alone(self) -> None:
        """Leave parameters that were frozen since the forward without a gradient, as in plain torch; DDP gives them
        zeros."""
        frozen = [p for p in self._trained if not p.requires_grad and p.grad is None]
        if frozen:
            # After the callbacks of torch's engines, which are asked for later in the pass.
            at_end_of_pass(lambda: at_end_of_pass(partial(_forget_gradients, frozen)))


def _forget_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _call(method: weakref.WeakMethod[Callable[..., None]], *args: object) -> None:
    """Run as a hook of an output: graphs do not keep replicas alive. The last of ``args`` is the gradient."""
    found = method()
    if found is not None:
        found(*args)


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return parameters that require gradients, as often as they stand in the module."""
    return [parameter for parameter in every_parameter(module) if parameter.requires_grad]


def refuse_thawed(module: nn.Module, args: object) -> None:
    """Run as a forward pre-hook of models that had nothing to train when they were prepared, and so are no replicas.

    Raises:
        UsageError: they have now.
    """
    if torch.is_grad_enabled() and trained_parameters(module):
        raise UsageError(
            f"{type(module).__name__} had no trainable parameters when it was prepared, so its gradients are not "
            "averaged over the ranks, but it has trainable parameters now. Call requires_grad_(True) before "
            "accelerator.prepare()."
        )


def _key(parameters: list[nn.Parameter]) -> frozenset[int]:
    return frozenset(map(id, parameters))
