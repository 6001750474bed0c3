"""The model that the training loop calls: all stages of it look like one module."""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.tree import LossFunction, tensor_leaves
from lockstep.errors import LockstepError, UsageError
from lockstep.model.changes import attributes_set
from lockstep.parallel.parallel_model import ModuleAround
from lockstep.parallel.pipeline.batch_dims import argument_names, described, find_batch
from lockstep.parallel.pipeline.errors import (
    PassPart,
    batch_norm,
    fails_on_parts,
    first_is_named,
    sees_micro_batches,
    text_of,
)
from lockstep.parallel.pipeline.layout import Layout
from lockstep.parallel.pipeline.local import LocalStages
from lockstep.parallel.pipeline.loss import reduction_of
from lockstep.parallel.pipeline.micro_batch import (
    BatchDims,
    ModelCall,
    count_for_evaluation,
    count_for_training,
    cut,
)
from lockstep.parallel.pipeline.options import PipelineOptions
from lockstep.parallel.pipeline.passes import Autocast, Batch, evaluate, forward_now, train
from lockstep.parallel.pipeline.plan import CallSignature, PipelinePlan, check_same_batch, signature
from lockstep.parallel.pipeline.stage import Executed, StageModule
from lockstep.parallel.pipeline.state import untouched
from lockstep.parallel.pipeline.traced import ModelTrace
from lockstep.parallel.pipeline.trial import try_forwards
from lockstep.parallel.pipeline.whole_trace import trace_model
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals.clip_grad import check_clipped

# Shapes of batches that are remembered.
PLANS = 16
_PIPELINES: weakref.WeakSet[PipelineModel] = weakref.WeakSet()


class PipelineModel(ModuleAround):
    """What ``split_model`` returns. ``module`` is the user's model with this rank's parameters.

    Every call is collective over the pipeline's ranks, which must pass the same batch.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        group: dist.ProcessGroup,
        options: PipelineOptions,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.module = module
        self._options = options
        self._local = LocalStages(type(module).__name__, layout, group, options, device)
        self._callbacks: list[Callable[[], None]] = []
        self._plans: OrderedDict[CallSignature, PipelinePlan] = OrderedDict()
        self._has_tried = False
        self._is_trying = False
        self._calls = 0
        self._has_warned_of_order = False
        self._is_made = True
        _PIPELINES.add(self)
        check_clipped(_refuse_norm_of_stages)

    # -- what it consists of -----------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether parameters outside of blocks have been given to the stages that use them."""
        return self._local.settled

    def local_blocks(self) -> dict[str, nn.Module]:
        """Return name -> module of the blocks of this rank, in order: what to recompute, compile and so on."""
        blocks = self._local.layout.blocks
        return {name: block.module for name, block in blocks.items() if block.module is not None}

    def on_settled(self, callback: Callable[[], None]) -> None:
        """Run ``callback()`` on all ranks in the first forward, when each knows which parameters it keeps."""
        self._callbacks.append(callback)

    def settle_like(self, other: PipelineModel) -> None:
        """Give parameters to the stages that have them in ``other``, if that is an equal model and has settled."""
        theirs = other._local
        if theirs.settled and not self.settled and self._local.layout.signature == theirs.layout.signature:
            self._local.place_parameters(theirs.uses, self._callbacks)

    def stage_modules(self) -> list[StageModule]:
        """Return one module for each stage of this rank, to shard. Names of parameters are the model's.

        Raises:
            UsageError: before the first forward.
        """
        if not self.settled:
            raise UsageError(
                "The stages of a pipeline are not known before its first forward. Pass a function to "
                "on_settled(callback), which is called then."
            )
        return list(self._local.modules.values())

    @property
    def micro_batch(self) -> int | None:
        """The one whose forward is running on this rank; None outside of one."""
        if self._is_trying:
            return None
        running = (stage.micro_batch for stage in self._local.modules.values())
        return next((number for number in running if number is not None), None)

    def blocks_of(self, stage: StageModule) -> dict[str, nn.Module]:
        """Return name -> module of the blocks of one of this rank's stages."""
        index = next(index for index, module in self._local.modules.items() if module is stage)
        blocks = self._local.layout.blocks
        return {name: module for name, module in self.local_blocks().items() if blocks[name].stage == index}

    def tied(self) -> dict[str, list[int]]:
        """Return name -> the pipeline's ranks that hold a parameter together; the first of them owns it. Once
        settled."""
        return dict(self._local.tied)

    def shared_between_stages(self) -> list[str]:
        """Return names of parameters that several stages of this rank use: they cannot be sharded stage by stage."""
        mine = set(self._local.indices)
        return [name for name, stages in self._local.layout.holders().items() if len(stages & mine) > 1]

    def owned(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters without those that an earlier rank holds too: what counts in a norm."""
        rank = self._local.group.rank()
        tied = self._local.tied
        return {name: p for name, p in self.held_parameters() if tied.get(name, [rank])[0] == rank}

    def held_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this rank's, each under its first name in the whole model."""
        for name, parameter in self.module.named_parameters():
            yield self._local.layout.first_name(name), parameter

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the whole model's, in its order. Those of other ranks have no values; computing with them is refused.

        So a list of them pairs with any other list of them, and nobody takes a part for the whole.
        """
        layout, held = self._local.layout, dict(self.held_parameters())
        for name in dict.fromkeys([*layout.every_name, *held]):
            first = layout.first_name(name)
            if (recurse or "." not in name) and not (remove_duplicate and name != first):
                yield prefix + name, held[first] if first in held else layout.elsewhere[first]

    def absent_parameters(self) -> dict[str, nn.Parameter]:
        """First name -> what is listed in the place of each parameter where other ranks have it."""
        return dict(self._local.layout.elsewhere)

    def __deepcopy__(self, memo: dict[int, object]) -> PipelineModel:
        """Refuse a copy, which would have neither the other ranks' parameters nor the group."""
        raise UsageError(
            f"{type(self.module).__name__} is divided into stages and cannot be copied with copy.deepcopy, as by "
            "AveragedModel(model). Copy the model before accelerator.prepare(), prepare the copy, too, and update it "
            "by zip(average.parameters(), model.parameters())."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this rank's parameters."""
        self.module.zero_grad(set_to_none)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Return this rank's, under the model's names."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: object, **kwargs: Any) -> Any:
        """Return this rank's part of the model's, under the model's names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load this rank's part."""
        return self.module.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(torch_modules.children_of(self)["module"], name)

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        """Set what the model has there, so that its forward finds it."""
        own = name.startswith("_") or name in ("module", "training") or not self.__dict__.get("_is_made")
        if own or not hasattr(self.module, name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward inside leaves the gradients of tied parameters unsummed; the next backward outside sums them."""
        return attributes_set(self._local, sums=False)

    def synchronised(self) -> AbstractContextManager[None]:
        """Backward inside sums them, also within ``no_sync``."""
        return attributes_set(self._local, sums=True)

    def executed(self) -> list[Executed]:
        """Return (rank, stage, kind, micro-batch) of what this rank did since the last forward began, in order.

        Kinds: ``F`` forward, ``B`` backward, ``I`` and ``W`` backward of the input and of the weights.
        """
        return list(self._local.executed)

    # -- a batch -----------------------------------------------------------------------------------------

    def forward(self, *args: object, **kwargs: object) -> object:
        """Return the model's output for the whole batch, on all ranks (see ``PipelineOptions.outputs``).

        If the model returns a loss and gradients are wanted, forward and backward of all micro-batches run now,
        in the order of the schedule; ``backward`` of the loss then adds the gradients to ``.grad``. If it returns
        no loss, the backwards run in ``backward``.

        Raises:
            UsageError: the batch cannot be cut, or the model not split.
        """
        return self._run(ModelCall(args, kwargs), None)

    def train_step(
        self,
        loss_fn: LossFunction,
        targets: Sequence[object] = (),
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Tensor:
        """Compute ``loss_fn(model(*args, **kwargs), *targets)`` for each micro-batch, in the order of the schedule.

        Returns:
            The mean (or sum) over micro-batches, on all ranks; its ``backward`` adds the gradients to ``.grad``.
        """
        return self._run(ModelCall(tuple(args), kwargs or {}, tuple(targets)), loss_fn)[0]

    def _run(self, call: ModelCall, loss_fn: LossFunction | None) -> Any:
        local, options = self._local, self._options
        autocast = Autocast(local.device.type)
        local.executed.clear()
        self._calls += 1
        with autocast.outside(), local.layout.placeholders.in_call(), self._named_failures():
            plan = self._plan(call, loss_fn, autocast)
            batch = Batch(call, cut(call, plan.micro_batches, plan.dims), plan, loss_fn, autocast)
            if not torch.is_grad_enabled():
                return evaluate(local, batch, options.outputs)
            self._refuse_gradients_of(call)
            if not self._has_tried:
                self._try(batch)
            if plan.loss is not None:
                return train(local, batch, options, self._parameters_by_name)
            self._check_loss_outside()
            return forward_now(
                local, batch, self._parameters_by_name, partial(self._named_failures, "backward")
            )

    def _named_failures(self, part: PassPart = "forward") -> AbstractContextManager[None]:
        return first_is_named(self._local.group, self._local.title, self._calls, part)

    def _try(self, batch: Batch) -> None:
        plan = batch.plan
        reduction = reduction_of(self._options.loss_reduction, batch.whole)
        needs_whole = reduction == "whole" if plan.loss is not None else not plan.by_rows
        rows = described(plan.dims, argument_names(self.module, batch.whole))
        with attributes_set(self, _is_trying=True):
            try_forwards(self._local, batch, needs_whole, rows)
        self._has_tried = True

    def _refuse_gradients_of(self, call: ModelCall) -> None:
        """Refuse gradients of arguments: they would come to the first stage's rank alone, or nowhere."""
        for path, tensor in tensor_leaves(call.tree).items():
            if tensor.requires_grad:
                name = argument_names(self.module, call)[path]
                raise UsageError(
                    f"The argument '{name}' of {type(self.module).__name__} requires a gradient, which a pipeline does "
                    "not compute for its arguments. Put the model that computes this argument into one module with "
                    "this one, and prepare that. If no gradient is needed, pass the argument with .detach()."
                )

    def _plan(self, call: ModelCall, loss_fn: LossFunction | None, autocast: Autocast) -> PipelinePlan:
        local, options = self._local, self._options
        training = torch.is_grad_enabled()
        key = signature(call, loss_fn, training, self.module.training, autocast.state)
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            return plan
        # Only for shapes that are new: comparing values waits for the device.
        check_same_batch(call, local.group, local.device)
        size, dims = find_batch(self.module, call, options.batch_dims)
        if training:
            count = count_for_training(options.micro_batches, size, options.schedule, local.ranks)
            self._refuse_batch_norm()
        else:
            count = count_for_evaluation(options.micro_batches, size, local.ranks)
        with autocast.inside(), untouched(self._named_modules()):
            traced, whole = self._traced(call, loss_fn, count, dims)
        plan = PipelinePlan.of(traced, whole, count, dims)
        if not training and plan.has_tensors_without_rows(local.layout):
            # Such tensors are right only if they are made of one part.
            plan = PipelinePlan.of(whole, whole, 1, dims)
        local.place_parameters(plan.traced.uses, self._callbacks)
        local.named_modules = self._named_modules
        plan.build_segments(self.module, local.layout, local.indices)
        self._plans[key] = plan
        if len(self._plans) > PLANS:
            self._plans.popitem(last=False)
        return plan

    def _traced(
        self, call: ModelCall, loss_fn: LossFunction | None, count: int, dims: BatchDims
    ) -> tuple[ModelTrace, ModelTrace]:
        """Return the traces of a micro-batch, of which there are ``count``, and of the whole batch."""
        trace = partial(trace_model, self.module, self._local.layout, loss_fn=loss_fn)
        if count == 1:
            whole = trace(call)
            return whole, whole
        try:
            part = trace(cut(call, count, dims)[0])
        except LockstepError:
            raise
        except Exception as error:
            # A user's forward may raise anything of a micro-batch. If the batch raises it as well, that one is raised.
            trace(call)
            rows = described(dims, argument_names(self.module, call))
            raise fails_on_parts(self._local.title, text_of(error), count, rows) from error
        return part, trace(call)

    def _refuse_batch_norm(self) -> None:
        from_ranks = self._local.gather_from_ranks(batch_norm(self._local.layout.own_modules()))
        name = next((one for one in from_ranks if one is not None), None)
        if name is not None:
            raise sees_micro_batches(self._local.title, name)

    def _named_modules(self) -> list[tuple[str, nn.Module]]:
        return list(self.module.named_modules())

    def _parameters_by_name(self) -> dict[str, nn.Parameter]:
        return dict(self.held_parameters())

    def _check_loss_outside(self) -> None:
        if self._options.outputs == "last":
            raise UsageError(
                "outputs='last' gives the model's outputs to one rank only, and the others cannot compute the "
                "loss. Return the loss from the model, use train_step, or use outputs='all'."
            )
        if not self._has_warned_of_order and dist.get_rank() == 0:
            self._has_warned_of_order = True
            warnings.warn(
                "The loss is computed outside the model, so all forwards run before all backwards (GPipe's "
                f"order), and schedule={self._options.schedule} has no effect. Return the loss from the model, "
                "or use train_step.",
                stacklevel=6,
            )


def _refuse_norm_of_stages(gradients: Sequence[Tensor]) -> None:
    """Raise UsageError if these are the gradients of all that this rank has of a model."""
    given = set(map(id, gradients))
    for model in _PIPELINES:
        mine = {id(p.grad) for _, p in model.held_parameters() if p.grad is not None}
        # Blocks may be clipped one by one.
        blocks = ({id(p.grad) for p in block.parameters()} for block in model.local_blocks().values())
        if mine and mine <= given and mine not in blocks:
            raise UsageError(
                f"torch's clip_grad_norm_ got this rank's gradients of {type(model.module).__name__}, which are a part "
                "of all: its norm would be another one on each stage. Call accelerator.clip_grad_norm_(), which takes "
                "the norm over all ranks."
            )
