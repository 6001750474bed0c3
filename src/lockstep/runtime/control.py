"""What a script asks of its process: who am I, print once, wait, go first, take my part.

``PartialState`` and ``Accelerator`` share these methods; the facts are those of one ``Runtime``.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from lockstep.config.enums import DistributedType
from lockstep.config.handlers import InitProcessGroupKwargs
from lockstep.config.sources import is_launched
from lockstep.errors import ArgumentError, UsageError
from lockstep.runtime import process
from lockstep.runtime.process import Runtime

Function = TypeVar("Function", bound=Callable[..., Any])


class ProcessControl:
    """Methods that need nothing but this process's ``Runtime``."""

    runtime: Runtime

    @property
    def num_processes(self) -> int:
        """The number of processes of the run, over all machines (the world size)."""
        return self.runtime.world_size

    @property
    def process_index(self) -> int:
        """The number of this process among all processes of the run, from 0 (the rank)."""
        return self.runtime.rank

    @property
    def local_process_index(self) -> int:
        """The number of this process among the processes of this machine, from 0 (the local rank)."""
        return self.runtime.local_rank

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.runtime.device

    @property
    def distributed_type(self) -> DistributedType:
        # As with Accelerate's launcher, one process that ours has started is not distributed; under torchrun it is.
        """The kind of devices of a run with several processes, or ``NO``."""
        if self.runtime.backend is None or (self.runtime.world_size == 1 and is_launched()):
            return DistributedType.NO
        kinds = {"cuda": DistributedType.MULTI_GPU, "xpu": DistributedType.MULTI_XPU}
        return kinds.get(self.runtime.device.type, DistributedType.MULTI_CPU)

    @property
    def use_distributed(self) -> bool:
        """Whether the run has several processes."""
        return self.runtime.world_size > 1

    @property
    def multi_device(self) -> bool:
        """Whether the run uses several accelerators."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def is_main_process(self) -> bool:
        """Whether this process is rank 0 of the run."""
        return self.runtime.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this process is local rank 0 of its machine."""
        return self.runtime.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this process is the last rank of the run."""
        return self.runtime.is_last

    def print(self, *args: object, **kwargs: Any) -> None:
        """Call Python's ``print`` with ``args`` and ``kwargs``, once on each machine.

        Examples:
            ```python
            from lockstep import Accelerator

            accelerator = Accelerator()
            accelerator.print("epoch", 1)  # one line, however many processes there are
            ```
        """
        if self.runtime.is_local_main:
            builtins.print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """Wait until every rank has called this method."""
        if self.runtime.world_size > 1:
            device_ids = [self.runtime.device.index] if self.runtime.control_device.type == "cuda" else None
            dist.barrier(device_ids=device_ids)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs the block first. The other ranks run it when rank 0 has left it, even by an exception.

        Examples:
            ```python
            from pathlib import Path
            from lockstep import Accelerator

            accelerator = Accelerator()
            with accelerator.main_process_first():
                if not Path("vocabulary.txt").exists():
                    Path("vocabulary.txt").write_text("a b c")  # rank 0 writes it, the others find it
            ```
        """
        with self._first(self.runtime.is_main):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Local rank 0 of each machine runs the block first. The others run it when all local ranks 0 have left it.

        Examples:
            ```python
            from pathlib import Path
            from lockstep import Accelerator

            accelerator = Accelerator()
            with accelerator.local_main_process_first():  # of each machine
                if not Path("tokens.txt").exists():
                    Path("tokens.txt").write_text("a b c")
            assert Path("tokens.txt").read_text() == "a b c"
            ```
        """
        with self._first(self.runtime.is_local_main):
            yield

    @contextmanager
    def _first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if first:
                self.wait_for_everyone()

    def on_main_process(self, function: Function) -> Function:
        """Decorate ``function`` so that it runs on rank 0 only. On other ranks it returns None.

        Examples:
            ```python
            from lockstep import Accelerator

            accelerator = Accelerator()

            @accelerator.on_main_process
            def report(loss: float) -> None:
                print(f"loss {loss:.3f}")

            report(0.25)
            ```
        """
        return _only_if(lambda: self.runtime.is_main, function)

    def on_local_main_process(self, function: Function) -> Function:
        """Decorate ``function`` so that it runs on local rank 0 of each machine only. Elsewhere it returns None.

        Examples:
            ```python
            from lockstep import Accelerator

            accelerator = Accelerator()

            @accelerator.on_local_main_process
            def unpack() -> str:
                return "unpacked"

            assert unpack() == ("unpacked" if accelerator.is_local_main_process else None)
            ```
        """
        return _only_if(lambda: self.runtime.is_local_main, function)

    def on_last_process(self, function: Function) -> Function:
        """Decorate ``function`` so that it runs on the last rank only. On other ranks it returns None.

        Examples:
            ```python
            from lockstep import Accelerator

            accelerator = Accelerator()

            @accelerator.on_last_process
            def report() -> str:
                return "reported"

            assert report() == ("reported" if accelerator.is_last_process else None)
            ```
        """
        return _only_if(lambda: self.runtime.is_last, function)

    @overload
    def on_process(self, function: Function, process_index: int | None = None) -> Function: ...
    @overload
    def on_process(
        self, function: None = None, process_index: int | None = None
    ) -> Callable[[Function], Function]: ...
    def on_process(self, function: object = None, process_index: int | None = None) -> Any:
        """Decorator ``@on_process(process_index=r)``: the function runs on rank ``r`` only, and else returns None.

        Examples:
            ```python
            from lockstep import Accelerator

            accelerator = Accelerator()

            @accelerator.on_process(process_index=0)
            def write() -> str:
                return "written"

            assert write() == ("written" if accelerator.process_index == 0 else None)
            ```
        """
        index = self._checked_index("process_index", process_index, self.runtime.world_size)
        return _decorator(lambda: self.runtime.rank == index, function)

    def on_local_process(self, function: object = None, local_process_index: int | None = None) -> Any:
        """Decorate a function with ``@on_local_process(local_process_index=r)``, so that it runs on local rank r
        only.

        On other ranks it returns None.

        Args:
            function: The function. None: the result is a decorator.
            local_process_index: The local rank.

        Raises:
            UsageError: ``local_process_index`` is missing or negative.

        Examples:
            ```python
            from lockstep import Accelerator

            accelerator = Accelerator()

            @accelerator.on_local_process(local_process_index=0)
            def unpack() -> str:
                return "unpacked"

            assert unpack() == ("unpacked" if accelerator.local_process_index == 0 else None)
            ```
        """
        index = self._checked_index("local_process_index", local_process_index, self.runtime.local_world_size)
        return _decorator(lambda: self.runtime.local_rank == index, function)

    def _checked_index(self, name: str, index: int | None, size: int) -> int:
        if index is None or index < 0:
            raise UsageError(
                f"{name} is {index}, but must be a rank from 0 to {size - 1}. Pass {name}=<rank>."
            )
        return index

    @contextmanager
    def split_between_processes(self, inputs: object, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this rank's contiguous part of ``inputs``.

        ``inputs`` is a list, a tuple, a tensor [n, ...], a ``datasets.Dataset``, or a mapping of these.
        If the length is not divisible by the number of ranks, the first ``len % world_size`` ranks get one element
        more. With ``apply_padding``, the other ranks repeat their last element, so that all parts are equally long.

        Raises:
            UsageError: a mapping whose values have different lengths.

        Examples:
            ```python
            from lockstep import Accelerator

            accelerator = Accelerator()
            with accelerator.split_between_processes(["a", "b", "c", "d"]) as prompts:
                print(prompts)  # with 2 processes: ["a", "b"] on rank 0, ["c", "d"] on rank 1
            ```
        """
        yield split_between(inputs, self.runtime.rank, self.runtime.world_size, apply_padding)


class _SharedState:
    """What every ``PartialState`` shows, as a mapping that is empty before the process has started.

    Libraries ask by it whether there is a state; there is nothing behind it that could be written.
    """

    def __get__(self, instance: object, owner: type) -> dict[str, Any]:
        runtime = process.current_runtime()
        if runtime is None:
            return {}
        return {
            "num_processes": runtime.world_size,
            "process_index": runtime.rank,
            "local_process_index": runtime.local_rank,
            "device": runtime.device,
            "backend": runtime.backend,
        }


class PartialState(ProcessControl):
    """The rank, device and process group of this process, for scripts that do not train.

    Args:
        cpu: Compute on the CPU even if the machine has an accelerator.
        kwargs: ``backend``, ``init_method`` and ``timeout`` of ``torch.distributed.init_process_group``.

    Examples:
        ```python
        from lockstep import PartialState

        state = PartialState()
        state.print(f"{state.num_processes} processes, this one on {state.device}")
        state.wait_for_everyone()
        ```
    """

    _shared_state = _SharedState()
    debug = False
    """Scripts may set it. Collectives compare what ranks pass to them in either case."""

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.runtime = process.start_runtime(cpu, InitProcessGroupKwargs(**kwargs))

    @staticmethod
    def _reset_state() -> None:
        """Let the next ``PartialState`` look at the environment anew; the process group stays."""
        process.forget()

    @property
    def initialized(self) -> bool:
        """True: the process has joined the run."""
        return True

    @property
    def fork_launched(self) -> bool:
        """Whether ``notebook_launcher`` started this process."""
        return False

    @property
    def default_device(self) -> torch.device:
        """The accelerator of this machine, or the CPU if it has none. The run itself may compute elsewhere."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if accelerator is None else torch.device(accelerator.type)

    def set_device(self) -> None:
        """Make the device of this process torch's current device. Joining the run has already done this.

        Examples:
            ```python
            from lockstep import PartialState

            state = PartialState()
            state.set_device()  # a GPU of this process's own, if there are any
            ```
        """
        if self.device.type not in ("cpu", "mps"):
            torch.accelerator.set_device_index(self.device)

    @property
    def backend(self) -> str | None:
        """The communication backend of this process's device, such as ``gloo`` or ``nccl``. None: no process group."""
        if self.runtime.backend is None:
            return None
        by_device = dict(part.split(":") for part in self.runtime.backend.split(",") if ":" in part)
        return by_device.get(self.device.type, self.runtime.backend)

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Leave the process group. A later ``PartialState()`` or ``Accelerator()`` joins again.

        Examples:
            ```python
            from lockstep import debug_launcher, PartialState

            def work() -> None:
                state = PartialState()
                state.wait_for_everyone()
                state.destroy_process_group()

            debug_launcher(work, num_processes=2)
            ```
        """
        if group is None:
            process.end_runtime()
        else:
            dist.destroy_process_group(group)

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}{f'  Backend: {self.backend}' if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


class RunState(PartialState):
    """``PartialState`` with the precision and the plugins of a run.

    Attributes:
        fsdp_plugin: Where models are sharded, what says how.
        deepspeed_plugin: The one that was passed, or that is selected.
    """

    dynamo_plugin: object = None
    device_mesh: None = None
    megatron_lm_plugin: None = None
    torch_tp_plugin: None = None

    def __init__(
        self,
        mixed_precision: str,
        distributed_type: DistributedType | None = None,
        fsdp_plugin: object = None,
        deepspeed_plugin: object = None,
        parallelism_config: object = None,
        deepspeed_plugins: Mapping[str, object] | None = None,
        select: Callable[[str], None] = lambda name: None,
    ) -> None:
        super().__init__()
        self.mixed_precision = mixed_precision
        self.fsdp_plugin = fsdp_plugin
        self.deepspeed_plugin = deepspeed_plugin
        self.parallelism_config = parallelism_config
        self._plugins = dict(deepspeed_plugins or {})
        self._select = select
        self._distributed_type = distributed_type

    @property
    def distributed_type(self) -> DistributedType:
        """``FSDP`` if models are sharded, on any device. Otherwise the kind of devices of the run, or ``NO``."""
        return super().distributed_type if self._distributed_type is None else self._distributed_type

    @property
    def deepspeed_plugins(self) -> dict[str, Any] | None:
        """The plugins by name; None where there is none."""
        if self._plugins:
            return dict(self._plugins)
        return None if self.deepspeed_plugin is None else {"default": self.deepspeed_plugin}

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded, by torch's ``fully_shard``."""
        return self.fsdp_plugin is not None

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return the DeepSpeed plugin with the name ``name``. If the run has one plugin only, return that.

        Raises:
            ValueError: no plugin has this name.

        Examples:
            ```python
            from lockstep import Accelerator
            from lockstep.utils import DeepSpeedPlugin

            teacher, student = DeepSpeedPlugin(zero_stage=3), DeepSpeedPlugin(zero_stage=2)
            accelerator = Accelerator(deepspeed_plugins={"student": student, "teacher": teacher})
            assert accelerator.state.get_deepspeed_plugin("teacher") is teacher
            ```
        """
        if not self._plugins:
            return self.deepspeed_plugin
        if name not in self._plugins:
            raise ArgumentError(
                f"There is no DeepSpeed plugin named {name!r}. The plugins are {', '.join(self._plugins)}. Use one of "
                "these names."
            )
        return self._plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Let the DeepSpeed plugin with the name ``name`` decide how models are sharded that are prepared from now
        on.

        If the run has one plugin only, nothing changes.

        Raises:
            ValueError: no plugin has this name, or the run has no plugin.

        Examples:
            ```python
            from lockstep import Accelerator
            from lockstep.utils import DeepSpeedPlugin

            teacher, student = DeepSpeedPlugin(zero_stage=3), DeepSpeedPlugin(zero_stage=2)
            accelerator = Accelerator(deepspeed_plugins={"student": student, "teacher": teacher})
            accelerator.state.select_deepspeed_plugin("teacher")  # for models that are prepared from now on
            assert accelerator.deepspeed_plugin is teacher
            ```
        """
        if self.deepspeed_plugin is None and not self._plugins:
            raise ArgumentError(
                f"The DeepSpeed plugin {name!r} cannot be selected, because this Accelerator has no DeepSpeed "
                "plugins. Pass the same deepspeed_plugins to it."
            )
        if self._plugins:
            self.deepspeed_plugin = self.get_deepspeed_plugin(str(name))
            self._select(str(name))

    def __repr__(self) -> str:
        return super().__repr__() + f"\nMixed precision type: {self.mixed_precision}\n"


def split_between(inputs: Any, rank: int, world_size: int, apply_padding: bool = False) -> Any:
    """Part ``rank`` of ``world_size`` of ``inputs``; see ``ProcessControl.split_between_processes``."""
    if world_size == 1:
        return inputs
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise UsageError(
                f"split_between_processes got a mapping whose values have different lengths: {lengths}. Pass "
                "values of the same length."
            )
        parts = {key: split_between(value, rank, world_size, apply_padding) for key, value in inputs.items()}
        return parts if type(inputs) is dict else type(inputs)(parts)  # type: ignore[call-arg]
    share, extra = divmod(len(inputs), world_size)
    start = rank * share + min(rank, extra)
    stop = start + share + (rank < extra)
    if hasattr(inputs, "select") and not isinstance(inputs, torch.Tensor):
        indices = list(range(start, stop))
        return inputs.select(_padded(indices, share, extra, len(inputs) - 1) if apply_padding else indices)
    part = inputs[start:stop]
    if not apply_padding or not len(inputs):
        return part
    missing = share + (extra > 0) - len(part)
    last = part[-1:] if len(part) else inputs[-1:]
    if isinstance(part, torch.Tensor):
        return torch.cat([part, last.repeat_interleave(missing, dim=0)])
    return part + last * missing


def _padded(indices: list[int], share: int, extra: int, default: int) -> list[int]:
    missing = share + (extra > 0) - len(indices)
    return indices + [indices[-1] if indices else default] * missing


def _only_if(condition: Callable[[], bool], function: Function) -> Function:
    @wraps(function)
    def run(*args: object, **kwargs: object) -> Any:
        return function(*args, **kwargs) if condition() else None

    return run  # type: ignore[return-value]


def _decorator(condition: Callable[[], bool], function: Any) -> Any:
    if function is not None:
        return _only_if(condition, function)
    return lambda decorated: _only_if(condition, decorated)
