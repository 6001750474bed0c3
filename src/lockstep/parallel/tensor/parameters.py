"""The parameters of a tensor-parallel model: DTensors, each split or whole, under their old names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lockstep.comm.dtensor import is_dtensor
from lockstep.parallel.tensor.plan import COLUMN_STYLES, PACKED, ROW_STYLES, TensorPlan, is_conv1d
from lockstep.torch_internals import dtensor
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals.replaced_parameters import retire

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement, Shard


def placement(module: nn.Module, name: str, style: str) -> Placement:
    """Return how a parameter of a module with this style lies on the mesh."""
    from torch.distributed.tensor import Replicate, Shard

    is_weight = name == "weight"
    if style in PACKED and name == "bias":
        # Split twice along its only dimension, no placement could tell where its rows are.
        return Replicate()
    if style in COLUMN_STYLES and name in ("weight", "bias"):
        dim = 1 if is_weight and is_conv1d(module) else 0
        pieces = PACKED.get(style, 1)
        return Shard(dim) if pieces == 1 else dtensor.strided_shard(dim, pieces)
    if style in ROW_STYLES and is_weight:
        return Shard(0 if is_conv1d(module) else 1)
    if style == "embedding_rowwise" and is_weight:
        return Shard(0)
    if style == "embedding_colwise" and is_weight:
        return Shard(1)
    return Replicate()


def zero_placement(parameter: nn.Parameter) -> Shard:
    """Return, for ``fully_shard(..., shard_placement_fn=)``, the dimension along which it splits this parameter
    further.

    It is the first, but for a fused query, key and value, whose rows of a rank are three pieces of the whole: rows of
    these cannot be split again in a way that DTensor knows, so that input features are.
    """
    from torch.distributed.tensor import Shard

    placements = getattr(parameter, "placements", ())
    is_packed = any(getattr(p, "split_factor", 1) > 1 and p.dim == 0 for p in placements)
    return Shard(1 if is_packed else 0)


def replace_parameters(modules: dict[str, nn.Module], plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Give the modules DTensors; using one of their parameters from before is an error afterwards."""
    styles = plan.styles
    made: dict[int, nn.Parameter] = {}
    placements: dict[int, Placement] = {}
    replaced: dict[int, nn.Parameter] = {}
    for module_name, module in modules.items():
        for name, parameter in torch_modules.parameters_of(module).items():
            if parameter is not None and not is_dtensor(parameter):
                wanted = placement(module, name, styles.get(module_name, ""))
                # Of a tied parameter, a module that splits it decides.
                if id(parameter) not in placements or not wanted.is_replicate():
                    placements[id(parameter)] = wanted
    for module_name, module in modules.items():
        for name, parameter in torch_modules.parameters_of(module).items():
            if parameter is None or is_dtensor(parameter):
                continue
            if id(parameter) not in made:
                made[id(parameter)] = distribute(parameter, mesh, placements[id(parameter)])
            torch_modules.parameters_of(module)[name] = made[id(parameter)]
            # Recurrent modules have theirs in a second list.
            if not torch_modules.has_flat_weights(module):
                replaced[id(parameter)] = parameter
        # Its forward views the result as [..., nf].
        if is_conv1d(module) and styles.get(module_name) in COLUMN_STYLES:
            vars(module)["nf"] //= mesh.size()
    for parameter in replaced.values():
        retire(parameter)


def distribute(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Return a parameter that is a DTensor, of the first rank's values; on the meta device of none."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    values = parameter.detach()
    if values.is_meta:
        sharded = distribute_tensor(values, mesh, [placement], src_data_rank=None)
    else:
        sharded = distribute_tensor(values, mesh, [placement])
    assert isinstance(sharded, DTensor)
    result = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
    result.__dict__.update(parameter.__dict__)
    return result
