"""``fully_shard``'s end of backward: what is reduced, when, and gradients that a rank lacks.

A ``param`` is torch's ``FSDPParam``, a ``group`` its ``FSDPParamGroup``, a state the ``FSDPState`` of one module.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.torch_internals.fsdp2 import accumulates_in_leaf, unreduced_grads, unsharded_param
from lockstep.torch_internals.fsdp2_gathered import FSDPParam, FSDPParamGroup, ShardedModule, set_own_grad


def before_reduction(group: FSDPParamGroup, call: Callable[[], None]) -> None:
    """Call it before the gradients of a group are taken and reduced; not where they stay with their rank.

    Relies on: all callers look ``post_backward`` up at the group, which reduces only with ``reduce_grads``.
    """
    post_backward = group.post_backward

    def call_first(*unused: object) -> None:
        if group.reduce_grads:
            call()
        post_backward(*unused)

    group.post_backward = call_first


def keep_for_another_backward(groups: list[object]) -> None:
    """Leave weights gathered in a pass that makes a graph (``create_graph=True``), which goes on to use them.

    Relies on: a pass through a group calls its ``pre_backward`` before any ``post_backward``, both looked up at the
    group, and autograd has gradients enabled then if it makes a graph; ``post_backward`` lets weights go if
    ``reshard_after_backward``.
    """
    # Of the pass that runs now; one for all groups.
    makes_graph = [False]

    def wrap(group: FSDPParamGroup) -> None:
        pre_backward, post_backward = group.pre_backward, group.post_backward

        def note(*args: object) -> None:
            makes_graph[0] = torch.is_grad_enabled()
            pre_backward(*args)

        def keep(*unused: object) -> None:
            if not makes_graph[0]:
                post_backward(*unused)
                return
            before, group.reshard_after_backward = group.reshard_after_backward, False
            try:
                post_backward(*unused)
            finally:
                group.reshard_after_backward = before

        group.pre_backward, group.post_backward = note, keep

    for group in groups:
        wrap(group)


def after_reductions(module: ShardedModule, call: Callable[[], None]) -> None:
    """Call it at the end of a pass in which a module took part, once the gradients are reduced.

    Relies on: ``_root_post_backward_final_callback`` is looked up at the state, queued once in each pass, and reduces
    what is left.
    """
    state = module._get_fsdp_state()
    final_callback = state._root_post_backward_final_callback

    def call_last() -> None:
        final_callback()
        call()

    state._root_post_backward_final_callback = call_last


def reaches_shards(group: FSDPParamGroup) -> bool:
    """Return whether a reduction now reaches the shards, and does not stop before the sum over replicas.

    Relies on: ``all_reduce_grads``, which counts with replicas only; ``mesh_info.replicate_mesh_size``.
    """
    return bool(group.all_reduce_grads) or getattr(group.mesh_info, "replicate_mesh_size", 1) == 1


def present_and_missing(group: FSDPParamGroup) -> tuple[list[FSDPParam], list[FSDPParam]]:
    """Return the params that have a gradient on this rank now, and those that are trained and have none.

    Before they were gathered once, there are neither.

    Relies on: ``_unsharded_param`` with its ``grad``; up to 2.14 ``unsharded_accumulated_grad`` beside it.
    """
    present, missing = [], []
    for param in group.fsdp_params:
        if unreduced_grads(param):
            present.append(param)
        elif (whole := unsharded_param(param)) is not None and whole.requires_grad:
            missing.append(param)
    return present, missing


def set_negative_zero(params: list[FSDPParam], others: list[object]) -> None:
    """Give these params gradients of negative zeros, of the type that ``others`` of their group have.

    Relies on: torch reduces the gradients of a group in one type; up to 2.14 those that do not have the type of the
    parameter are in ``unsharded_accumulated_grad``.
    """
    dtype = next((gradient.dtype for other in others for gradient in unreduced_grads(other)), None)
    for param in params:
        whole = param._unsharded_param
        if accumulates_in_leaf():
            wanted = dtype or getattr(whole, "grad_dtype", None) or whole.dtype
            set_own_grad(whole, torch.zeros_like(whole, dtype=wanted).neg_())
        elif dtype in (None, whole.dtype):
            set_own_grad(whole, torch.zeros_like(whole).neg_())
        else:
            param.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=dtype).neg_()


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether ``module.compile()`` was called. Relies on: ``_compiled_call_impl`` is None before."""
    return getattr(module, "_compiled_call_impl", None) is not None


def call_empty(module: ShardedModule, values: object, inside: Callable[[object], object]) -> object:
    """Run torch's hooks around a call of a sharded module, and in between ``inside`` on ``values`` instead of it.

    Relies on: ``_pre_forward`` takes (module, args, kwargs) and returns the last two, with what reduces gradients
    attached; ``_post_forward`` takes (module, args, output) and returns the last, with what gathers for backward.
    """
    state = module._get_fsdp_state()
    (carried,), _ = state._pre_forward(module, (values,), {})
    return state._post_forward(module, (carried,), inside(carried))
