"""The sharded models of one ``Accelerator``, and the optimizers that step on their shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.comm.dtensor import is_dtensor, shard_like
from lockstep.config.parallel import Parallel
from lockstep.errors import UsageError
from lockstep.observe.log import get_logger
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.zero.sharding import Sharding
from lockstep.torch_internals.dtensor_operators import behave_like_plain
from lockstep.torch_internals.replaced_parameters import retire
from lockstep.train.optimizer import PreparedOptimizer
from lockstep.train.sharded_optimizer import (
    check_optimizer,
    choose_implementation,
    replace_parameters,
    step_without_dispatch,
)
from lockstep.train.whole.apply import step_on_whole, whole_step_of
from lockstep.train.whole.kinds import check_elementwise, declares_elementwise, steps_on_shards

logger = get_logger(__name__)


class ParameterRegistry:
    """Knows which parameters took the places of which. Where none did every method does nothing.

    Args:
        active: Models are spread so that parameters may change.
        loss_is_scaled: Optimizers step through a loss scaler.
        parallel: How models are spread.
    """

    def __init__(self, active: bool, loss_is_scaled: bool, parallel: Parallel) -> None:
        self._active = active
        self._loss_is_scaled = loss_is_scaled
        self.parallel = parallel
        self._of_models: list[Sharding] = []
        # Parameter as it was -> the one that took its place, or None; for optimizers that hold the former.
        self._replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._noted: set[int] = set()

    def add_model(
        self,
        model: ParallelModel,
        before: Mapping[str, nn.Parameter],
        after: Mapping[str, nn.Parameter],
        optimizers: list[PreparedOptimizer],
    ) -> None:
        """Take note of a prepared model, and give its parameters to optimizers that were prepared before it.

        Args:
            before: The parameters that it had, by name.
            after: Those that it has now.
        """
        self._of_models += [sharding for sharding in model.shardings if sharding not in self._of_models]
        if any(map(is_dtensor, after.values())):
            behave_like_plain(shard_like)
        self._note_replaced(before, after)
        if self._active:
            for optimizer in optimizers:
                self._hand_over(optimizer.optimizer)

    def _note_replaced(self, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]) -> None:
        """Note which parameters replaced which; one of which no name is left is another rank's now."""
        left = {id(old) for name, old in before.items() if name in after}
        changed = {old: after[name] for name, old in before.items() if name in after}
        gone = [old for old in before.values() if id(old) not in left]
        # A pipeline comes here twice: what took a place the first time may be replaced, or leave, the second time.
        for first, now in list(self._replaced.items()):
            if now in changed:
                self._replaced[first] = changed[now]
            elif any(now is old for old in gone):
                self._replaced[first] = None
        self._replaced.update({old: new for old, new in changed.items() if old is not new})
        self._replaced.update(dict.fromkeys(gone))
        for old in gone:
            # The script may still have it, in a list from before ``prepare``.
            if type(old) is nn.Parameter:
                retire(old)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Give an optimizer the shards of the parameters that it holds, and drop gathered ones before it steps."""
        if not self._active:
            return
        for group in optimizer.param_groups:
            group["params"] = self.current(group["params"])
        self._hand_over(optimizer)
        if whole_step_of(optimizer) is None:
            optimizer.register_step_pre_hook(lambda *_: self.reshard())

    def current(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the same, but the shard of each that a sharded model has gathered, as between forward and backward."""
        if not self._of_models:
            return parameters
        gathered = self._gathered()
        return [gathered.get(id(parameter), parameter) for parameter in parameters]

    def resolve(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return what ``current`` returns, with each parameter from before a model was spread replaced by its
        successor.

        Those that other ranks have now are left out.
        """
        if self._replaced:
            found = (self._replaced.get(parameter, parameter) for parameter in parameters)
            parameters = [parameter for parameter in found if parameter is not None]
        return self.current(parameters) if self._of_models else parameters

    def _gathered(self) -> dict[int, nn.Parameter]:
        return {id(whole): shard for sharding in self._of_models for whole, shard in sharding.gathered()}

    def is_replaced(self, parameter: torch.Tensor) -> bool:
        """Return whether another took the place of this parameter, here or on another rank."""
        return parameter in self._replaced

    def refuse_shared_parameters(self, model: nn.Module) -> None:
        """Raise UsageError if a parameter of ``model`` belongs to a model that was spread before."""
        names = [name for name, parameter in model.named_parameters() if parameter in self._replaced]
        if names:
            raise UsageError(
                f"{type(model).__name__} shares {len(names)} parameters ('{names[0]}', ...) with a model that "
                "was sharded before. Put both models into one module, and prepare that module."
            )

    def reshard(self) -> None:
        """Drop gathered parameters."""
        for sharding in self._of_models:
            sharding.reshard()

    def recover(self) -> None:
        """Forget a backward that raised."""
        for sharding in self._of_models:
            sharding.recover()

    def discard_unreduced(self, optimizer: Optimizer) -> None:
        """Forget gradients of this optimizer's shards that ``zero_grad`` does not see."""
        if not self._of_models:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for sharding in self._of_models:
            sharding.discard_unreduced(parameters)

    def clear(self) -> None:
        self._of_models.clear()
        self._replaced.clear()
        self._noted.clear()

    def _hand_over(self, optimizer: Optimizer) -> None:
        """Give an optimizer what took the place of its parameters, and let it step as is right for these."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        on_shards = steps_on_shards(optimizer)
        originals = {id(new): old for old in parameters if (new := self._replaced.get(old)) is not None}
        replace_parameters(optimizer, self._replaced, lay_out=on_shards)
        left = sum(len(group["params"]) for group in optimizer.param_groups)
        # Only a pipeline leaves some to other ranks.
        if left < len(parameters) and self.parallel.pp == 1:
            raise UsageError(
                f"{type(optimizer).__name__} holds {len(parameters)} parameters, but {len(parameters) - left} of them "
                f"have no successor in the model that parallel='{self.parallel}' has divided, so its steps would not "
                "train them. Prepare the model first, and make the optimizer from the parameters of what prepare() "
                "returned."
            )
        check_optimizer(optimizer, self.parallel)
        sharded = [p for group in optimizer.param_groups for p in group["params"] if is_dtensor(p)]
        if declares_elementwise(optimizer):
            check_elementwise(optimizer)
        if on_shards or not sharded:
            choose_implementation(optimizer, self._loss_is_scaled)
            if sharded:
                step_without_dispatch(optimizer)
            return
        step_on_whole(optimizer, originals, self.reshard)
        self._warn_of_whole_steps(optimizer, sharded)

    def _warn_of_whole_steps(self, optimizer: Optimizer, sharded: Sequence[torch.Tensor]) -> None:
        if id(optimizer) in self._noted:
            return
        self._noted.add(id(optimizer))
        nbytes = sum(parameter.numel() * parameter.element_size() for parameter in sharded)
        logger.warning(
            "%s is not known to update each element separately. To give the numbers of one process, each of its "
            "steps gathers whole parameters, gradients and state on every rank: %.1f MiB for each of these. If "
            "it updates each element separately, set 'elementwise = True' in its class: it then steps on "
            "shards, and is checked.",
            type(optimizer).__name__,
            nbytes / 2**20,
        )
