"""Data parallel: every process, or every GPU of one process, holds the whole model."""

# Without postponed annotations: DDP compares those of a communication hook with types, not with strings.
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DataParallel
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from lockstep.config.enums import DDPCommunicationHookType as Hook
from lockstep.config.handlers import DistributedDataParallelKwargs
from lockstep.errors import ConfigError, UsageError
from lockstep.parallel.ddp.replica import DistributedDataParallel, refuse_thawed
from lockstep.runtime.process import Runtime
from lockstep.torch_internals import c10d, gloo
from lockstep.torch_internals import tensors as torch_tensors
from lockstep.torch_internals.fsdp2 import is_sharded

GradientHook = Callable[[Any, c10d.GradBucket], "torch.futures.Future[torch.Tensor]"]


def has_trained_parameters(model: nn.Module) -> bool:
    """Return whether there is something to average; if not, a model that is thawed later is refused in its forward."""
    if any(parameter.requires_grad for parameter in nn.Module.parameters(model)):
        return True
    model.register_forward_pre_hook(refuse_thawed)
    return False


def distributed_data_parallel(
    model: nn.Module, runtime: Runtime, options: DistributedDataParallelKwargs
) -> DistributedDataParallel:
    """Replicate ``model`` on all ranks; gradients are averaged during backward.

    Reference: Li et al., PyTorch Distributed, VLDB 2020.

    Raises:
        ConfigError: contradictory or unknown hook options.
    """
    device_ids = [runtime.device.index] if runtime.device.type == "cuda" else None
    arguments = _arguments(options)
    if Hook(options.comm_hook) == Hook.POWER_SGD and runtime.device.type == "cpu":
        # Its callbacks issue further all-reduces; gloo runs those of several buckets in any order.
        arguments["bucket_cap_mb"] = 1 << 20
    group = None
    if _is_sparse(model) and runtime.device.type == "cpu" and gloo.carries(runtime.device):
        group = arguments["process_group"] = gloo.group_with_one_thread()
    hook = gradient_hook(options, group)

    def configure(replica: TorchDDP) -> None:
        if hook is None:
            _form_buckets_now(replica, runtime)
        else:
            replica.register_comm_hook(*hook)

    return DistributedDataParallel(model, {"device_ids": device_ids, **arguments}, configure)


def _form_buckets_now(replica: TorchDDP, runtime: Runtime) -> None:
    """Let DDP form its buckets now, in the order in which it expects gradients, and not after the first backward.

    Above two ranks the order in which an element's gradients are added up depends on its place in a bucket. A run
    that goes on from a checkpoint would have other buckets in its first step than the uninterrupted one, and so
    other bits ever after. DDP forms no new buckets with ``find_unused_parameters``; a static graph, sparse gradients,
    and parameters with hooks or gradients are left alone. Collective.
    """
    if runtime.world_size <= 2 or replica.find_unused_parameters or replica.static_graph:
        return
    if _is_sparse(replica.module):
        return
    trained = [p for p in nn.Module.parameters(replica.module) if p.requires_grad]
    busy = any(
        p.grad is not None
        or torch_tensors.hooks_of_parameter(p, torch_tensors.TENSOR)
        or torch_tensors.hooks_of_parameter(p, torch_tensors.POST_ACCUMULATE)
        for p in trained
    )
    # One rank alone may have a hook.
    busy_anywhere = torch.tensor(int(busy), device=runtime.device)
    dist.all_reduce(busy_anywhere, dist.ReduceOp.MAX)
    if busy_anywhere.item():
        return
    replica.reducer.prepare_for_backward([])
    # From the last to the first, as a backward brings them.
    for parameter in reversed(trained):
        torch.autograd.backward(parameter, torch.zeros_like(parameter))
    for parameter in trained:
        parameter.grad = None
    c10d.rebuild_buckets(replica.reducer)


def _is_sparse(model: nn.Module) -> bool:
    return any(getattr(module, "sparse", False) for module in model.modules())


def data_parallel(model: nn.Module, runtime: Runtime) -> nn.Module:
    """Wrap the model in ``torch.nn.DataParallel``: one process drives all GPUs of the machine.

    Raises:
        UsageError: fewer than two GPUs.
    """
    count = torch.cuda.device_count() if runtime.device.type == "cuda" else 0
    if count < 2:
        raise UsageError(
            f"parallel='dataparallel' needs at least 2 GPUs, but this process sees {count}. Drop this option."
        )
    warnings.warn(
        f"torch.nn.DataParallel drives {count} GPUs from one process: it copies the model at every forward and "
        f"is slowed down by the one Python interpreter. 'lockstep launch --nproc {count}' runs the same script "
        "faster.",
        stacklevel=2,
    )
    return DataParallel(model)


def gradient_hook(
    options: DistributedDataParallelKwargs, group: dist.ProcessGroup | None = None
) -> tuple[object, GradientHook] | None:
    """Return the (state, hook) that ``register_comm_hook`` takes for these options; None: DDP's own all-reduce."""
    hook, wrapper = Hook(options.comm_hook), Hook(options.comm_wrapper)
    state: object = group
    function: GradientHook
    if hook == Hook.NO:
        if wrapper == Hook.NO:
            return None
        function = default_hooks.allreduce_hook
    elif hook in (Hook.FP16, Hook.BF16):
        function = _HALF_HOOKS[hook]
    elif hook == Hook.POWER_SGD:
        state = powerSGD_hook.PowerSGDState(process_group=group, **options.comm_state_option)
        function = powerSGD_hook.powerSGD_hook
    else:
        # It hands a matrix to a function that asserts a batch of matrices, on every device.
        raise ConfigError(f"comm_hook='{hook}' fails inside torch {torch.__version__}. Use 'power_sgd'.")
    if wrapper in _HALF_TYPES:
        function = _in_half(function, _HALF_TYPES[wrapper])
    elif wrapper != Hook.NO:
        raise ConfigError(
            f"comm_wrapper is '{wrapper}', but only 'fp16' or 'bf16' can wrap a hook. Use one of these."
        )
    return state, function


def _arguments(options: DistributedDataParallelKwargs) -> dict[str, object]:
    arguments = options.to_kwargs()
    for name in ("comm_hook", "comm_wrapper", "comm_state_option", "check_reduction"):
        arguments.pop(name, None)
    return arguments


def _half_all_reduce(dtype: torch.dtype) -> GradientHook:
    """Average gradients in a 16-bit type. Torch's own bf16 hook refuses to run without CUDA."""

    def hook(state: object, bucket: c10d.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        # Divided before the sum, which could overflow in fp16.
        compressed = buffer.to(dtype).div_(dist.get_world_size())
        future = dist.all_reduce(compressed, group=state, async_op=True).get_future()
        return future.then(lambda done: buffer.copy_(done.value()[0]))

    return hook


def _in_half(inner: GradientHook, dtype: torch.dtype) -> GradientHook:
    """Cast a bucket to ``dtype``, run ``inner`` on it, and cast the result back."""

    def hook(state: object, bucket: c10d.GradBucket) -> torch.futures.Future[torch.Tensor]:
        original = bucket.buffer()
        bucket.set_buffer(original.to(dtype))

        def restore(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            value = done.value()
            result = value[0] if isinstance(value, list) else value
            bucket.set_buffer(original)
            return original.copy_(result)

        return inner(state, bucket).then(restore)

    return hook


_HALF_TYPES = {Hook.FP16: torch.float16, Hook.BF16: torch.bfloat16}
_HALF_HOOKS = {hook: _half_all_reduce(dtype) for hook, dtype in _HALF_TYPES.items()}


def join_replicas(models: Iterable[Any], world_size: int) -> AbstractContextManager[object]:
    """Let ranks that have run out of batches answer the others' collectives until all are done.

    Reference: ``torch.distributed.algorithms.join``.

    Raises:
        UsageError: an object that is not a replica made by ``prepare``.
    """
    if world_size == 1:
        return nullcontext()
    models = list(models)
    for model in models:
        if is_sharded(model):
            raise UsageError(
                f"join_uneven_inputs got a {type(model).__name__} that is sharded: every rank takes part in each of "
                "its forwards. Use even batches and accelerator.sample_weights(), or parallel='ddp'."
            )
        if not isinstance(model, Joinable):
            raise UsageError(
                f"join_uneven_inputs got a {type(model).__name__}, which is not replicated over the ranks. "
                "Pass the models that accelerator.prepare() returned."
            )
    return Join(models, enable=True, throw_on_early_termination=False)
