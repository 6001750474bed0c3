"""Which prepared models are compared with the whole ones: those whose forward is split."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.dtensor import is_dtensor
from lockstep.comm.tree import LossFunction
from lockstep.errors import UsageError
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.tensor.communication import PART_BEGINS, PART_ENDS
from lockstep.preparation.run_context import RunContext
from lockstep.torch_internals import autograd

if TYPE_CHECKING:
    from lockstep.verify.proof import Verification

ROUNDING = 16
"""Times the precision of the loss, by which equal computations may differ."""
_OF_A_PART = (
    "Such are activations between two split layers, which a module keeps in an attribute or a hook takes out. Compute "
    "such a term from what the module returns, or keep the layers of this module whole with a tp_plan of your own. To "
    "train anyway, pass verify='off'."
)


class Verifications:
    """Belongs to one ``Accelerator``.

    Args:
        at_rest: Lets go of gathered parameters.
        unnoticed: Runs a backward of which nothing will be left.
    """

    def __init__(
        self,
        run: RunContext,
        at_rest: Callable[[], None],
        unnoticed: Callable[[Callable[[], None]], None],
    ) -> None:
        self._run = run
        self._at_rest = at_rest
        self._unnoticed = unnoticed
        self._of_models: dict[int, Verification] = {}
        self._next: Verification | None = None
        self._backwards = 0

    def before_split(self, model: nn.Module) -> None:
        """Copy ``model`` while it is still whole, if it will be split. Collective where it is."""
        parallel = self._run.options.parallel
        self._next = None
        if not parallel.splits_forward or parallel.verify == "off" or self._run.runtime.world_size == 1:
            return
        # Here, because it imports DTensor, which takes long.
        from lockstep.verify.proof import Setup, Verification

        setup = Setup(
            parallel=parallel,
            axes=parallel.splits_forward,
            interval=parallel.verify_interval,
            device=self._run.runtime.device,
            shares_batches=self._run.meshes.data_size > 1,
            half=self._half(),
            is_compiled=self._run.options.compile_options is not None,
            at_rest=self._at_rest,
            unnoticed=self._unnoticed,
        )
        self._next = Verification(model, setup, self._run.communicator)

    def _half(self) -> torch.dtype | None:
        """Return the type of gathered weights, where it has 16 bits."""
        precision = self._run.options.mixed_precision
        if not self._run.options.parallel.shards or precision == "no":
            return None
        return torch.float16 if precision == "fp16" else torch.bfloat16

    def watch(self, prepared: ParallelModel) -> None:
        """Verify a model that was made of the last one given to ``before_split``."""
        if self._next is not None:
            self._next.watch(prepared)
            self._of_models[id(prepared.module)] = self._next
            self._next = None

    def before_step(
        self,
        model: nn.Module,
        loss_function: LossFunction,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        targets: tuple[object, ...],
    ) -> None:
        """Verify a call of a model whose loss is computed outside of it, if it is time."""
        verification = self._of_models.get(id(model))
        if verification is not None:
            from lockstep.verify.passes import ComparedBatch

            verification.before_call(ComparedBatch(args, kwargs, loss_function, targets))

    def before_backward(self, loss: torch.Tensor) -> None:
        """Raise UsageError if ranks with parts of the same layers come to different losses of the same batch.

        What leaves a split module by an attribute or a hook is a part on each rank, and so is what the script computes
        of it. This is asked in the first backward, the second, the fourth, the eighth, and so on. Collective then.
        """
        mesh = self._run.meshes.axis("tp")
        if mesh is None or self._run.options.parallel.verify == "off":
            return
        # Few nodes: a sum over the ranks ends each path through a split layer. No value shows a term over itself.
        if any(node.name() in PART_BEGINS for node in autograd.nodes_of(loss, PART_ENDS)):
            raise UsageError(
                f"A term of the loss was computed from a part of a tensor, and each of the ranks that share the layers "
                f"of a model (tp={mesh.size()}) has another part. {_OF_A_PART}"
            )
        self._backwards += 1
        # Seldom, because on an accelerator reading waits for it. A power of two has one bit.
        if self._backwards & (self._backwards - 1):
            return
        whole: Any = loss.detach()
        if is_dtensor(whole):
            whole = whole.full_tensor()
        mine = whole.double().sum()
        values = [torch.zeros_like(mine) for _ in range(mesh.size())]
        dist.all_gather(values, mine, group=mesh.get_group())
        found = torch.stack(values)
        # What is not finite is named with its rank by the checks of damage.
        found = found[found.isfinite()]
        # All ranks compute the same of the same numbers; the last bits may be those of another order of additions.
        allowed = ROUNDING * torch.finfo(whole.dtype).eps
        if not torch.allclose(found, found[:1].expand_as(found), rtol=allowed, atol=0.0):
            raise UsageError(
                f"The ranks that share the layers of a model (tp={mesh.size()}) computed different losses of the same "
                f"batch: {', '.join(f'{value:.7g}' for value in found.tolist())}. So a term of the loss was computed "
                f"from a part of a tensor, or random numbers differ between the ranks. {_OF_A_PART}"
            )

    def clear(self) -> None:
        """Forget all models."""
        self._backwards = 0
        self._of_models.clear()
