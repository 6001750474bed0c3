"""What a sharded model needs in a step beyond torch's own hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.dtensor import local

BROADCAST_BYTES = 250 * 2**20  # of one message, as in DDP


class Sharding:
    """Belongs to one sharded model, which carries it; ``sharding_of`` finds it.

    Args:
        stage: Of ZeRO.
        groups: The modules that ``fully_shard`` was applied to.
        whole: Parameters that every rank holds whole, whose gradients ``average_whole`` averages.
        buffers: (module, name) of each buffer that rank 0 hands out before a forward.
        replaced: (parameter before, parameter now) of each that changed.
    """

    def __init__(
        self,
        stage: int,
        groups: list[Any],
        whole: list[nn.Parameter],
        buffers: list[tuple[nn.Module, str]],
        replaced: list[tuple[nn.Parameter, nn.Parameter]],
    ) -> None:
        self.stage = stage
        self._groups = groups
        self._whole = whole
        self._buffers = buffers
        self._replaced = replaced
        self._held_back = False

    def take_replaced(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """(parameter before, parameter now) of each that changed; forgotten afterwards."""
        replaced, self._replaced = self._replaced, []
        return replaced

    @contextmanager
    def inside_window(self) -> Iterator[None]:
        """Backward inside is that of a micro-batch which does not end its accumulation window.

        Stage 1 keeps each rank's own whole gradients. The others reduce to shards at once, and leave only
        the sum over replicas to the window's end. Stages 1 and 2 keep the gathered parameters.
        """
        with self._hold_back(reduce=self.stage >= 2):
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside adds to each rank's own whole gradients; they are not communicated."""
        with self._hold_back(reduce=False):
            yield

    @contextmanager
    def _hold_back(self, reduce: bool) -> Iterator[None]:
        self._set_flags(reduce=reduce, all_reduce=False, reshard=self.stage == 3)
        self._held_back, before = True, self._held_back
        try:
            yield
        finally:
            self._held_back = before
            self._set_flags(reduce=True, all_reduce=True, reshard=True)

    def _set_flags(self, reduce: bool, all_reduce: bool, reshard: bool) -> None:
        for group in self._groups:
            group.set_requires_gradient_sync(reduce, recurse=False)
            group.set_requires_all_reduce(all_reduce, recurse=False)
            group.set_reshard_after_backward(reshard, recurse=False)

    def reshard(self) -> None:
        """Drop gathered parameters, which are stale once the optimizer has stepped."""
        for group in self._groups:
            group.reshard()

    def after_forward(self, *_: Any) -> None:
        """Drop gathered parameters that no backward will need. Kept ones stand in the model in the shards' place:
        changes made to them by hand would be lost, and those made to the shards not seen.
        """
        if not torch.is_grad_enabled():
            self.reshard()

    def gathered(self) -> Iterator[tuple[torch.Tensor, nn.Parameter]]:
        """(whole parameter, its shard) of each that is gathered now."""
        for group in self._parameter_groups():
            if group.is_unsharded:
                for parameter in group.fsdp_params:
                    yield parameter.unsharded_param, parameter.sharded_param

    @torch.no_grad()
    def gradients(self) -> Iterator[torch.Tensor]:
        """The tensors in which this rank accumulates gradients now: shards, and what is not yet reduced."""
        for group in self._parameter_groups():
            for parameter in group.fsdp_params:
                if parameter.sharded_param.grad is not None:
                    yield local(parameter.sharded_param.grad)
        for owner, name in self._unreduced():
            yield local(getattr(owner, name))
        for parameter in self._whole:
            if parameter.grad is not None:
                yield parameter.grad

    def discard_unreduced(self, of: Iterable[torch.Tensor]) -> None:
        """Forget gradients of these shards that were not reduced yet: ``zero_grad`` does not see them."""
        for owner, name in list(self._unreduced({id(shard) for shard in of})):
            setattr(owner, name, None)

    @torch.no_grad()
    def average_whole(self) -> None:
        """Average the gradients of parameters that are not sharded. Collective.

        Doing it twice does no harm: an average of equal numbers is that number. A gradient that only some
        ranks lack counts as zero there; one that all lack stays away.
        """
        if not self._whole:
            return
        gradients = [p.new_zeros(()) if p.grad is None else p.grad for p in self._whole]
        present = [
            torch.full_like(g, float(p.grad is not None)) for g, p in zip(gradients, self._whole, strict=True)
        ]
        message = torch.stack([*gradients, *present]).double()
        dist.all_reduce(message)
        means = message[: len(gradients)] / dist.get_world_size()
        for i, parameter in enumerate(self._whole):
            # Only where it matters is the number read, because on an accelerator reading waits for it.
            if parameter.grad is not None or message[len(gradients) + i].item():
                parameter.grad = means[i].to(parameter.dtype)

    @torch.no_grad()
    def broadcast_buffers(self, *_: Any) -> None:
        """Give all ranks rank 0's buffers, as DDP does before each forward; not inside a window. Collective."""
        if self._held_back:
            return
        tensors = [module._buffers[name] for module, name in self._buffers]
        broadcast: Any = dist._broadcast_coalesced  # type: ignore[attr-defined]  # private; DDP's own way
        broadcast(dist.group.WORLD, tensors, BROADCAST_BYTES, 0)

    def _parameter_groups(self) -> Iterator[Any]:
        """torch's own record of each group of parameters (private; its name changed after 2.11)."""
        seen: set[int] = set()
        for module in self._groups:
            state = module._get_fsdp_state()
            if id(state) in seen:
                continue
            seen.add(id(state))
            found = getattr(state, "_fsdp_param_groups", None)
            yield from found if found is not None else filter(None, [state._fsdp_param_group])

    def _unreduced(self, ids: set[int] | None = None) -> Iterator[tuple[Any, str]]:
        """(owner, attribute) of each tensor with gradients that were not reduced to shards of all ranks.

        ``ids``: of the shards to look at. A sum over some ranks is of all shards of its group together.
        """
        for group in self._parameter_groups():
            wanted = [p for p in group.fsdp_params if ids is None or id(p.sharded_param) in ids]
            candidates = [(group, "_partial_reduce_output")] if wanted else []
            for parameter in wanted:
                candidates.append((parameter, "unsharded_accumulated_grad"))
                candidates.append((getattr(parameter, "_unsharded_param", None), "grad"))
            for owner, name in candidates:
                if getattr(owner, name, None) is not None:
                    yield owner, name


def sharding_of(model: nn.Module) -> Sharding | None:
    """The ``Sharding`` of a model that ``shard`` returned."""
    found = getattr(model, "_sharding", None)
    return found if isinstance(found, Sharding) else None


def synchronised_buffers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """(module, name) of the buffers that may change in training: saved ones that are not masks (bool)."""
    return [
        (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
        and name not in module._non_persistent_buffers_set
        and buffer.dtype is not torch.bool
    ]
