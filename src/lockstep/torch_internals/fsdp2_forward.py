"""``fully_shard`` of several modules at once: the parts of torch's hooks around their forwards.

torch ends the forward of such modules when all of them have run, and gathers for backward only when backward comes to
the last one. With these parts the caller decides. All modules of a group have one ``FSDPState`` between them.
"""

from __future__ import annotations

import torch

from lockstep.torch_internals.fsdp2 import param_groups
from lockstep.torch_internals.fsdp2_gathered import ShardedModule


def is_known() -> bool:
    """Return whether this torch's hooks can be taken apart so: 2.11 gathers the modules of a group one by one."""
    return torch.torch_version.TorchVersion(torch.__version__) >= "2.12"


def drop_hooks(module: ShardedModule) -> None:
    """Take torch's own hooks off all modules of a group.

    Relies on: the state has the handles ``_pre_forward_hook_handle`` and ``_post_forward_hook_handle``.
    """
    state = module._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


def is_before_backward(module: ShardedModule) -> bool:
    """Return whether a forward now is one that is computed again, in which torch leaves the weights as they are.

    Relies on: ``_training_state`` is PRE_BACKWARD from the time when backward comes to a group until it has left it.
    """
    return bool(module._get_fsdp_state()._training_state.name == "PRE_BACKWARD")


def begin_again(module: ShardedModule) -> None:
    """Let a forward that is computed again begin as another one, if the group's gradients were reduced already.

    Reentrant checkpointing computes one block after the other again, each with a backward of its own.

    Relies on: a group's ``_training_state`` is POST_BACKWARD from its reduction on; the state's stays PRE_BACKWARD.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    if is_before_backward(module) and all(
        group._training_state == TrainingState.POST_BACKWARD for group in param_groups(module)
    ):
        module._get_fsdp_state()._training_state = TrainingState.IDLE


def is_forward_root(module: ShardedModule) -> bool:
    """Return whether the forward that runs now began with this group: its module was called by itself.

    Relies on: ``_state_ctx.iter_forward_root`` is the state whose forward began first, None outside of forwards.
    """
    state = module._get_fsdp_state()
    return bool(state._state_ctx.iter_forward_root is state)


def gather_for_backward(module: ShardedModule, output: object) -> object:
    """Return the output, with a hook that gathers the group's weights when backward comes to it.

    Relies on: ``_register_pre_backward_hook`` returns the output.
    """
    return module._get_fsdp_state()._register_pre_backward_hook(output)


def end_forward(module: ShardedModule) -> None:
    """Let the group's weights go as at the end of a forward, where no module's output is at hand.

    Relies on: ``post_forward`` uses none of its arguments but the output, which it returns; ``_training_state`` is
    IDLE between forwards.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for group in param_groups(module):
        group.post_forward(None, None, None)
    module._get_fsdp_state()._training_state = TrainingState.IDLE


def one_of_each_group(modules: list[ShardedModule]) -> list[ShardedModule]:
    """Return the first module of each state."""
    # From the back, so that of each state the first module is the one that stays.
    return list({id(module._get_fsdp_state()): module for module in reversed(modules)}.values())[::-1]
