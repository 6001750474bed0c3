"""Whether the installed torch's ``fully_shard`` behaves as ``fsdp2`` relies on, shown by torch's own code."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param as param_file
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group_file

from lockstep.torch_internals import fsdp2, fsdp2_gathered
from lockstep.torch_internals.fsdp2_gathered import FSDPParam, FSDPParamGroup
from lockstep.torch_internals.versions import expect, probed

ENGINE, KEEPS = "fully_shard", "keeps gradients"


@probed(ENGINE, KEEPS)
def probe() -> None:
    """Let torch's own code accumulate gradients in records that belong to no model and no process group.

    Two backward passes that reduce nothing: what ``fsdp2`` reads must be the sum of both, once.
    """
    # The type of the parameter, and another one: up to 2.14 these are kept in different places.
    for reduced in (torch.float32, torch.float64):
        group, param = _bare(reduced)
        for number in (1.0, 2.0):
            (param._unsharded_param * number).sum().backward()
            # The wrapper around it would import the compiler.
            inspect.unwrap(group_file.FSDPParamGroup.post_backward)(group)
        found = fsdp2.unreduced_grads(param)
        expect(len(found) == 1 and found[0].tolist() == [3.0, 3.0], "the sum of two gradients, once")
        expect(found[0].dtype == reduced, "the type in which gradients are accumulated")
        fsdp2.discard_unreduced_grad(param)
        expect(fsdp2.unreduced_grads(param) == [], "a gradient that was discarded")
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
    group.reshard_after_backward = group.reduce_grads = False
    return group, param
