"""Whether the installed torch's ``fully_shard`` behaves as ``fsdp2`` relies on, shown by torch's own code."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_common as common_file
from torch.distributed.fsdp._fully_shard import _fsdp_param as param_file
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group_file
from torch.distributed.fsdp._fully_shard import _fsdp_state as state_file

from lockstep.torch_internals import fsdp2, fsdp2_gathered
from lockstep.torch_internals.fsdp2_gathered import FSDPParam, FSDPParamGroup
from lockstep.torch_internals.versions import expect, probed

ENGINE, KEEPS = "fully_shard", "keeps gradients"


@probed(ENGINE, KEEPS)
def probe() -> None:
    """Let torch's own code accumulate gradients in records that belong to no model and no process group.

    Two backward passes that reduce nothing, and two that reduce over one shard and leave out the replicas:
    what ``fsdp2`` reads must be the sum of both, once, and torch must go on from what it puts back.
    """
    # The type of the parameter, and another one: up to 2.14 these are kept in different places.
    for reduced in (torch.float32, torch.float64):
        _probe_unreduced(reduced)
    _probe_partial()
    _probe_hooks()
    fsdp2_gathered.probe()


def check_group(group: FSDPParamGroup) -> None:
    """Raise UsageError unless this record of a model that was just sharded has what ``fsdp2`` relies on."""
    check = probed(ENGINE, KEEPS)(lambda: _check_group(group))
    check()


def _check_group(group: FSDPParamGroup) -> None:
    expect(isinstance(group, group_file.FSDPParamGroup), "kind of the group")
    expect(fsdp2.partial_reduce_output(group) is None and not fsdp2.is_unsharded(group), "a group at rest")
    expect(
        fsdp2.mesh_of(group).shards >= 1 and isinstance(fsdp2.device_of(group), torch.device),
        "mesh and device",
    )
    for param in fsdp2.params(group):
        expect(isinstance(param, param_file.FSDPParam), "kind of the record")
        local, kept = fsdp2.sharded_param(param)._local_tensor, param._sharded_param_data
        same = local.untyped_storage().data_ptr() == kept.untyped_storage().data_ptr()
        expect(same and kept.ndim == 1, "one memory for the shard's two names")
        # Of a parameter that tp has split, the record knows this rank's part and the shard the shape of all.
        same_size = fsdp2.sharded_param(param).numel() == fsdp2.whole_numel(param)
        expect(param.is_dtensor or same_size, "the shape of the whole parameter")
        expect(fsdp2.unreduced_grads(param) == [], "no gradient before the first backward")


def _probe_unreduced(reduced: torch.dtype) -> None:
    group, param = _bare(reduced)
    group.reduce_grads = False
    for number in (1.0, 2.0):
        _backward(group, param, number)
    _expect_once(param, 3.0, reduced)
    taken = fsdp2.unreduced_grads(param)[0].clone()
    fsdp2.discard_unreduced_grad(param)
    expect(fsdp2.unreduced_grads(param) == [], "a gradient that was discarded")
    fsdp2.set_unreduced_grad(param, taken)
    _backward(group, param, 4.0)
    _expect_once(param, 7.0, reduced)


def _probe_partial() -> None:
    group, param = _bare(torch.float32)
    group.mesh_info = object.__new__(common_file.DDPMeshInfo)
    group.mesh_info.replicate_process_group = _TwoReplicas()
    group.comm_ctx.lazy_init(group.device)
    group.all_reduce_grads = False
    for number in (1.0, 2.0):
        _backward(group, param, number)
    output, rows = fsdp2.partial_reduce_output(group), fsdp2.partial_reduce_rows(group)
    expect(output is not None and output.tolist() == [3.0, 3.0], "the sum over one replica")
    expect(rows == [fsdp2.Rows(param, 0, 2)], "the layout of that sum")
    fsdp2.discard_partial_reduce_output(group)
    again, other = _bare(torch.float32)
    again.mesh_info, again.comm_ctx, again.all_reduce_grads = group.mesh_info, group.comm_ctx, False
    assert output is not None
    fsdp2.set_partial_reduce_output(again, output, fsdp2.packed([other]))
    _backward(again, other, 4.0)
    output = fsdp2.partial_reduce_output(again)
    expect(output is not None and output.tolist() == [7.0, 7.0], "a sum that was put back")
    _backward(group, param, 4.0)
    output = fsdp2.partial_reduce_output(group)
    expect(output is not None and output.tolist() == [4.0, 4.0], "a sum that was discarded")


def _probe_hooks() -> None:
    """Check that forwards in the state that ``gathered_by_hand`` gives them begin and end nothing."""
    state = state_file.FSDPState()
    state._training_state = common_file.TrainingState.PRE_BACKWARD
    state._mp_policy = MixedPrecisionPolicy()
    args, kwargs = inspect.unwrap(state_file.FSDPState._pre_forward)(state, nn.Identity(), (1,), {"x": 2})
    expect((args, kwargs) == ((1,), {"x": 2}), "the inputs of a forward with weights that are gathered")
    output = inspect.unwrap(state_file.FSDPState._post_forward)(state, nn.Identity(), (1,), 3)
    expect(output == 3 and state._training_state.name == "PRE_BACKWARD", "the end of such a forward")


def _bare(reduced: torch.dtype) -> tuple[FSDPParamGroup, FSDPParam]:
    """Return a group with one record, whose parameter of two numbers is gathered."""
    policy, device = MixedPrecisionPolicy(reduce_dtype=reduced), torch.device("cpu")
    no_mesh: Any = None
    group: FSDPParamGroup = group_file.FSDPParamGroup(
        [], (), no_mesh, None, device, None, policy, OffloadPolicy()
    )
    whole = nn.Parameter(torch.ones(2))
    param: FSDPParam = object.__new__(param_file.FSDPParam)
    param.sharded_param, param._unsharded_param = nn.Parameter(torch.ones(2)), whole
    param._unsharded_dtensor_spec = param._sharding_spec = None
    param.sharded_state = param_file.ShardedState.UNSHARDED
    param.padded_sharded_param_size = param.sharded_size = torch.Size([2])
    param.orig_dtype, param.param_dtype = torch.float32, None
    param.reduce_dtype = None if reduced == torch.float32 else reduced
    param.is_dtensor = param.is_spmd_types = param._has_sharded_grad_dtype_override = param.offload_to_cpu = (
        False
    )
    param.sharded_grad_dtype = torch.float32
    if fsdp2.accumulates_in_leaf():
        whole.grad_dtype = param.unsharded_grad_dtype
    else:
        param.unsharded_accumulated_grad = None
    group.fsdp_params = [param]
    group._orig_dtype, group._reduce_dtype = torch.float32, param.reduce_dtype
    group._reduce_scatter_param_indices = [0]
    group.reshard_after_backward = False
    return group, param


def _backward(group: FSDPParamGroup, param: FSDPParam, number: float) -> None:
    """Return what torch does with gradients of ``number`` when the backward of a group has come to its end."""
    (param._unsharded_param * number).sum().backward()
    # The wrapper around it would import the compiler.
    inspect.unwrap(group_file.FSDPParamGroup.post_backward)(group)


def _expect_once(param: FSDPParam, number: float, dtype: torch.dtype) -> None:
    found = fsdp2.unreduced_grads(param)
    expect(len(found) == 1 and found[0].tolist() == [number, number], "the sum of two gradients, once")
    expect(found[0].dtype == dtype, "the type in which gradients are accumulated")


class _TwoReplicas:
    """Stands for a process group that nobody communicates over."""

    def size(self) -> int:
        return 2
