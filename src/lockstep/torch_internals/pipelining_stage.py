"""torch's record of one stage in a pipeline; up to torch 2.12 with what later versions do between stages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, _backward, schedules
from torch.distributed.pipelining import stage as stages

from lockstep.torch_internals.autograd import FunctionContext
from lockstep.torch_internals.versions import undisturbed

_Stage: Any = PipelineStage


class _StageUpTo212(_Stage):
    """A stage that sends zeros where an input has no gradient but the stage before waits for one, as from 2.13 on.

    Relies on: ``bwd_cache`` has the gradients of the inputs of a micro-batch after its backward;
    ``_create_grad_send_info`` says for each input where its gradient goes, None: nowhere.
    """

    def __init__(self, *args: object, input_args: tuple[torch.Tensor, ...], **options: object) -> None:
        super().__init__(*args, input_args=input_args, **options)
        self._examples = input_args

    def backward_one_chunk(self, bwd_chunk_id: int, *args: object, **options: object) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **options)
        if bwd_chunk_id in self.bwd_cache and not self.is_first:
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros(example.shape, dtype=example.dtype, device=self.device)
                if example.requires_grad and gradient is None
                else gradient
                for gradient, example in zip(self.bwd_cache[bwd_chunk_id], self._examples, strict=True)
            )

    def _create_grad_send_info(self, args_recv_info: object) -> list[int | None]:
        found = super()._create_grad_send_info(args_recv_info)
        return [
            to if example.requires_grad else None for to, example in zip(found, self._examples, strict=True)
        ]


class _StageOf211(_StageUpTo212):
    """A stage where only those tensors have gradients whose examples do, as from 2.12 on.

    Relies on: ``_prepare_forward_infra`` makes of the examples the records ``args_recv_info``, whose buffers all
    require gradients if ``has_backward``; ``_create_grad_recv_info`` says for each output where its gradient comes
    from; a record other than ``_RecvInfo`` is not received.
    """

    def _prepare_forward_infra(self, num_microbatches: int, args: object, kwargs: object = None) -> object:
        stage: Any = self
        wanted = stage.has_backward
        stage.has_backward = False
        try:
            outputs = super()._prepare_forward_infra(num_microbatches, args, kwargs)
        finally:
            stage.has_backward = wanted
        for records in self.args_recv_info.values():
            for record, example in zip(records, self._examples, strict=True):
                if isinstance(record, stages._RecvInfo) and record.buffer is not None:
                    record.buffer.requires_grad_(wanted and example.requires_grad)
        return outputs

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        given = (prev_stage_outputs,) if isinstance(prev_stage_outputs, torch.Tensor) else prev_stage_outputs
        for record, tensor, example in zip(self.args_recv_info[mb_index], given, self._examples, strict=True):
            record.buffer = tensor.detach().requires_grad_(example.requires_grad)

    def _create_grad_recv_info(self, act_send_info: object) -> object:
        found = super()._create_grad_recv_info(act_send_info)
        examples = self.get_outputs_meta()
        return tuple(
            record if example.requires_grad else None
            for record, example in zip(found, examples[: len(found)], strict=True)
        )

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> object:
        return tuple(record and record.buffer for record in self.grad_recv_info[bwd_chunk_id])

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        for record, tensor in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True):
            if record is not None:
                record.buffer = tensor

    def _validate_fwd_outputs(self, outputs: object) -> None:
        """The shapes are those of a forward that was looked at; nobody receives what the last stage returns."""

    def _get_init_p2p_neighbors_ops(self) -> list[object]:
        """A first message in both directions is for NCCL; gloo of torch 2.11 may not be connected yet."""
        return [] if self.device.type == "cpu" else super()._get_init_p2p_neighbors_ops()


def _stage_of_this_torch() -> object:
    if hasattr(PipelineStage, "_get_grad_send_meta"):
        return PipelineStage
    return _StageUpTo212 if hasattr(schedules, "InferenceMode") else _StageOf211


StageBase: Any = _stage_of_this_torch()


class _ProductAndSum(torch.autograd.Function):
    """A product and a sum, by one node of autograd."""

    @staticmethod
    def forward(ctx: FunctionContext, weight: torch.Tensor, x: torch.Tensor) -> Any:
        ctx.save_for_backward(weight, x)
        return weight * x, weight + x

    @staticmethod
    def backward(ctx: FunctionContext, product: torch.Tensor, total: torch.Tensor) -> Any:
        weight, x = ctx.saved_tensors
        return product * x + total, product * weight + total


def _of_both(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    product, total = _ProductAndSum.apply(weight, x)
    return 5 * product + 7 * total


@functools.cache
def splits_backward_exactly() -> bool:
    """Whether the backward of weights may come apart from that of inputs: up to torch 2.12 the gradient of a weight
    that is used twice is wrong then, and one whose result has two parts fails.

    Relies on: ``stage_backward_input(outputs, output_grads, inputs, weights)`` gives what
    ``stage_backward_weight(weights, groups)`` goes on from.
    """
    with undisturbed():
        try:
            twice = _split_gradients(lambda weight, x: weight * (weight * x))
            both = _split_gradients(_of_both)
        except RuntimeError:
            return False
    return twice == (9.0, 12.0) and both == (22.0, 17.0)


def _split_gradients(function: Callable[..., torch.Tensor]) -> tuple[float, float]:
    """Those of x = 2 and of weight = 3."""
    x, weight = (nn.Parameter(torch.tensor([value])) for value in (2.0, 3.0))
    _, groups = _backward.stage_backward_input([function(weight, x)], None, [x], iter([weight]))
    _backward.stage_backward_weight(iter([weight]), groups)
    found: Any = x.grad, weight.grad
    return found[0].item(), found[1].item()
