"""The state of this process and of its run, as objects that scripts hold: ``PartialState``, ``RunState``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from lockstep.config.enums import DistributedType
from lockstep.config.handlers import InitProcessGroupKwargs
from lockstep.errors import ArgumentError
from lockstep.runtime import process
from lockstep.runtime.control import ProcessControl


class _SharedState:
    """What every ``PartialState`` shows, as a mapping that is empty before the process has started.

    Libraries ask by it whether there is a state; there is nothing behind it that could be written.
    """

    def __get__(self, instance: object, owner: type) -> dict[str, object]:
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
        dynamo_plugin: How models are compiled; its backend is ``NO`` where they are not.
    """

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
        dynamo_plugin: object = None,
    ) -> None:
        super().__init__()
        self.mixed_precision = mixed_precision
        self.fsdp_plugin = fsdp_plugin
        self.deepspeed_plugin = deepspeed_plugin
        self.parallelism_config = parallelism_config
        self.dynamo_plugin = dynamo_plugin
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
