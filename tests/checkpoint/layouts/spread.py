"""A small model spread over ranks in many ways, by torch alone: what checkpoints are compared with."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lockstep.checkpoint import DataCoordinates, FullModelSpec

WIDTH, HIDDEN, WORDS, BLOCKS, EXPERTS = 6, 10, 7, 4, 4
Values = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("table", torch.zeros(3))


class Net(nn.Module):
    """Tied weights at both ends, a scalar, buffers, stacked experts, and rows that don't divide by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(BLOCKS)})
        self.experts = nn.Parameter(torch.zeros(EXPERTS, WIDTH, 5))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(0))


def values(seed: int) -> Values:
    """Whole tensors of all names; the same for tied ones."""
    found = {}
    for name, like in Net().state_dict().items():
        key = "embed.weight" if name == "head.weight" else name
        generator = torch.Generator().manual_seed(zlib.crc32(f"{key} {seed}".encode()))
        drawn = torch.randn(like.shape, generator=generator)
        found[name] = drawn if like.is_floating_point() else (drawn.abs() * 100).to(like.dtype)
    return found


TENSOR_PARALLEL: dict[str, Any] = {
    "embed.weight": Shard(0),
    "head.weight": Shard(0),
    "qkv.weight": _StridedShard(0, split_factor=3),
    "qkv.bias": _StridedShard(0, split_factor=3),
    "out.weight": Shard(1),
    "up.weight": Shard(0),
    "up.bias": Shard(0),
    "down.weight": Shard(1),
}


def _replace(model: nn.Module, placement_of: Callable[[str], Any], mesh: DeviceMesh) -> None:
    """Give the model DTensors in place of the parameters that have a placement."""
    replaced: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        placement = placement_of(name)
        if placement is None:
            continue
        if id(parameter) not in replaced:
            spread = distribute_tensor(parameter.detach().clone(), mesh, [placement], src_data_rank=None)
            replaced[id(parameter)] = nn.Parameter(spread)
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, replaced[id(parameter)])


def tensor_parallel(name: str) -> Any:
    return next((placement for end, placement in TENSOR_PARALLEL.items() if name.endswith(end)), Replicate())


def expert_parallel(name: str) -> Any:
    return Shard(0) if name == "experts" else None


@dataclass
class Layout:
    """One way to spread the model over ``world`` ranks."""

    name: str
    world: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero: bool = False

    def __post_init__(self) -> None:
        self._meshes: dict[str, DeviceMesh] = {}

    def prepare(self, rank: int) -> Layout:
        """Make the meshes; collective."""
        data = self.world // (self.tp * self.pp)
        self._rank, self._data = rank, data
        sizes, names = (self.pp, data, self.tp), ("pp", "data", "tp")
        if self.tp > 1 or self.zero:
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            self._meshes = {"tp": mesh["tp"], "data": mesh["data"]}
        if self.ep > 1:
            self._meshes["ep"] = init_device_mesh(
                "cpu", (self.world // self.ep, self.ep), mesh_dim_names=("copies", "ep")
            )["ep"]
        return self

    @property
    def place(self) -> DataCoordinates | None:
        if self.tp * self.pp == 1:
            return None
        data_rank = self._rank // self.tp % self._data
        return DataCoordinates(data_rank, self._data, data_rank, self._data)

    @property
    def whole(self) -> dict[int, FullModelSpec]:
        if self.pp == 1:
            return {}
        return {0: FullModelSpec(tuple(Net().state_dict()), {"head.weight": "embed.weight"})}

    def build(self, given: Values) -> nn.Module:
        """The model of this rank with these weights."""
        model = Net()
        model.load_state_dict(given)
        if self.pp > 1:
            _keep_stage(model, self._rank // (self.world // self.pp), self.pp)
        if self.tp > 1:
            _replace(model, tensor_parallel, self._meshes["tp"])
        if self.ep > 1:
            _replace(model, expert_parallel, self._meshes["ep"])
        if self.zero:
            scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0}
            fully_shard(model, mesh=self._meshes["data"], ignored_params=scalars)
        return model


def _keep_stage(model: Any, stage: int, stages: int) -> None:
    each = BLOCKS // stages
    for i in range(BLOCKS):
        if i // each != stage:
            del model.blocks[str(i)]
    if stage > 0:
        del model.embed
        del model.seen
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    if stage < stages - 1:
        del model.head
        del model.scale
        del model.experts


LAYOUTS = [
    Layout("plain", 1),
    Layout("ddp", 2),
    Layout("zero=3", 2, zero=True),
    Layout("tp=2", 2, tp=2),
    Layout("pp=2", 2, pp=2),
    Layout("ep=2", 2, ep=2),
    Layout("ddp tp=2", 4, tp=2),
    Layout("zero=3 tp=2", 4, tp=2, zero=True),
    Layout("pp=4", 4, pp=4),
    Layout("pp=2 tp=2", 4, pp=2, tp=2),
    Layout("zero=3 pp=2", 4, pp=2, zero=True),
    Layout("ddp ep=2", 4, ep=2),
]


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    decayed = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-3, foreach=False
    )


@dataclass
class State:
    """Whole weights, and the moments of AdamW after ``steps``."""

    weights: Values
    first: Values
    second: Values
    steps: int

    @staticmethod
    def drawn(seed: int, steps: int) -> State:
        second = {name: value.abs() for name, value in values(seed + 2).items()}
        return State(values(seed), values(seed + 1), second, steps)


class Run:
    """A model and its optimizer in one layout, in this state."""

    def __init__(self, layout: Layout, state: State) -> None:
        self.layout = layout
        self.model = layout.build(state.weights)
        self.optimizer = optimizer_of(self.model)
        first, second = (dict(layout.build(m).named_parameters()) for m in (state.first, state.second))
        for name, parameter in self.model.named_parameters():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(state.steps)),
                "exp_avg": first[name].detach(),
                "exp_avg_sq": second[name].detach(),
            }

    def step(self, gradients: Values) -> None:
        """One step with these whole gradients."""
        given = dict(self.layout.build(gradients).named_parameters())
        for name, parameter in self.model.named_parameters():
            parameter.grad = given[name].detach()
        self.optimizer.step()

    def parts(self) -> dict[str, torch.Tensor]:
        """What this rank holds, by name."""
        found = {name: part(value) for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            held = self.optimizer.state[parameter]
            found |= {f"{name}:{key}": part(value) for key, value in held.items()}
        return found


def part(tensor: Any, copy: bool = True) -> torch.Tensor:
    """What this rank holds of a tensor."""
    held: torch.Tensor = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
    return held.clone() if copy else held
