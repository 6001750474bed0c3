"""What ``prepare`` does with models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.checkpoint.contents import FullModelSpec, ties_of
from lockstep.observe.log import get_logger
from lockstep.observe.run_observer import RunObserver
from lockstep.parallel.autocast import DTYPES
from lockstep.parallel.materialize import InitWeights
from lockstep.parallel.model_options import ModelOptions
from lockstep.parallel.parallel_model import ParallelModel, unwrap
from lockstep.parallel.parallelize import parallelize
from lockstep.parallel.steps import refuse_transforms
from lockstep.preparation.checks import (
    PreparedObjects,
    refuse_aliases,
    refuse_offloaded_quantized,
    refuse_replicas,
    refuse_ties,
)
from lockstep.preparation.gradients import Gradients
from lockstep.preparation.run_context import RunContext
from lockstep.preparation.shards import ParameterRegistry
from lockstep.preparation.stepping import StepChecks
from lockstep.preparation.verifications import Verifications
from lockstep.train.optimizer import PreparedOptimizer

if TYPE_CHECKING:
    from lockstep.preparation.offload import OffloadManager

logger = get_logger(__name__)


@dataclass(eq=False)
class ModelPreparation:
    """Prepares the models of one ``Accelerator``, and is the owner of the list of them.

    Args:
        seen: What was prepared before, of any kind.
        registry: Which parameters took the places of which.
        prepared: The models that were prepared so far: a list that grows.
        optimizers: The prepared ones, which get parameters of models that are prepared after them.
        wholes: What models were of which this rank has some blocks, by their place in ``prepared``.
    """

    run: RunContext
    seen: PreparedObjects
    registry: ParameterRegistry
    prepared: list[ParallelModel]
    optimizers: list[PreparedOptimizer]
    gradients: Gradients
    verifications: Verifications
    step_checks: StepChecks
    offload: OffloadManager | None
    wholes: dict[int, FullModelSpec] = field(default_factory=dict)

    def prepare(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        init_weights: InitWeights | None = None,
    ) -> nn.Module:
        if self.seen.has_made(model):
            return model
        refuse_replicas(model)
        refuse_offloaded_quantized(model)
        self.registry.refuse_shared_parameters(model)
        options = self.run.options
        if self.offload is not None:
            self.offload.check_budget(model, self.run.meshes.axes.shard)
        # A compiled model has other names: these must be those of ``_take_over``.
        plain = unwrap(model, keep_compile=False)
        whole = _full_model_spec(plain) if self.run.meshes.axes.pp > 1 else None
        if not evaluation_mode:
            if self.run.runtime.world_size > 1 and options.parallel.replaces_parameters:
                refuse_aliases(plain, options.parallel)
            _keep_master_weights(plain, options.mixed_precision, options.parallel.shards)
        before = dict(plain.named_parameters(remove_duplicate=False))
        prepared = parallelize(
            model,
            self.run.runtime,
            ModelOptions(
                **vars(options),
                meshes=self.run.meshes,
                init_weights=init_weights,
                loss_scale=None if self.run.scaler is None else self.run.scaler.scaler.get_scale,
            ),
            device_placement=self.run.device_placement if device_placement is None else device_placement,
            evaluation_mode=evaluation_mode,
            before_split=lambda: None if evaluation_mode else self.verifications.before_split(model),
        )
        # Nothing takes their places: optimizers that are made of the prepared model leave them out.
        before |= {f"{name} elsewhere": p for name, p in prepared.absent_parameters().items()}
        if not evaluation_mode:
            self.verifications.watch(prepared)
        if options.parallel.splits_forward:
            # Before what compares the first batch.
            prepared.module.register_forward_pre_hook(refuse_transforms, prepend=True)
        # Popped when the pipeline has settled: until then it keeps what this rank will drop.
        until_settled = [self._take_over(prepared, before)]
        if not options.parallel.zero:
            # Those that are sharded have no values any more.
            prepared.on_settled(lambda: refuse_ties(until_settled[0], type(plain).__name__, options.parallel))
        prepared.on_settled(lambda: self._take_over(prepared, until_settled.pop()))
        prepared.on_settled(self._settle_alike)
        if self.offload is not None:
            self.offload.add_model(prepared)
        self.gradients.add(prepared.module, is_trained=not evaluation_mode)
        # Not before: what was refused may be mended and prepared again.
        self.seen.add(model, prepared.module)
        if self.run.runtime.world_size > 1 and not evaluation_mode:
            self.step_checks.start()
        if whole is not None:
            self.wholes[len(self.prepared)] = whole
        self.prepared.append(prepared)
        self._settle_alike()
        if not evaluation_mode:
            self.run.measures.model_prepared(prepared)
        for observer in RunObserver.registered if not evaluation_mode else ():
            observer.model_prepared(prepared)
        return prepared.module

    def parallel_of(self, model: nn.Module) -> ParallelModel:
        """Return how a model is spread; one that was not prepared here is each rank's own."""
        found = next((known for known in self.prepared if known.module is model), None)
        return ParallelModel(model) if found is None else found

    def whole_of(self, model: nn.Module) -> FullModelSpec | None:
        """Return what a model was of which this rank has some blocks; None for others."""
        number = next((i for i, known in enumerate(self.prepared) if known.module is model), None)
        return None if number is None else self.wholes.get(number)

    def clear(self) -> None:
        """Forget all models."""
        self.prepared.clear()
        self.wholes.clear()

    def _settle_alike(self) -> None:
        """Give a model and an average of its weights the same parameters, also if one of them is never called."""
        for model in self.prepared:
            for other in self.prepared:
                model.settle_like(other)

    def _take_over(self, prepared: ParallelModel, before: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Let optimizers have the parameters that came in the place of others. Returns these by name."""
        now = dict(prepared.plain.named_parameters(remove_duplicate=False))
        self.registry.add_model(prepared, before, now, self.optimizers)
        return now


def _full_model_spec(model: nn.Module) -> FullModelSpec:
    """Return the names of all weights, before other ranks' blocks leave."""
    return FullModelSpec(tuple(model.state_dict()), ties_of(model))


def _keep_master_weights(model: nn.Module, mixed_precision: str, shards: bool) -> None:
    """Have trained weights in fp32, in place, where ZeRO casts them for each forward. Elsewhere warn.

    A step loses what changes a weight by less than half of its last digit, which of bf16 is 1/256 of the weight.
    """
    low = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16)
    }
    if mixed_precision not in DTYPES or not low:
        return
    if not shards:
        name, first = next(iter(low.items()))
        logger.warning(
            "%d trained weights of %s ('%s', ...) are in %s, and steps that change a weight by less than a 256th of it "
            "may change nothing. With mixed_precision='%s' keep weights in 32 bits: load the model by "
            "from_pretrained(..., dtype=torch.float32), or call model.float() before prepare().",
            *(len(low), type(model).__name__, name, str(first.dtype).removeprefix("torch."), mixed_precision),
        )
        return
    for parameter in low.values():
        # Types of other libraries say that they have 16 bits, too.
        if type(parameter.data) is torch.Tensor:
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.float()
            parameter.grad = None if gradient is None else gradient.float()
