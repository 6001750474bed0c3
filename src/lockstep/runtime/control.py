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
from lockstep.config.sources import is_launched
from lockstep.errors import UsageError
from lockstep.runtime.process import Runtime

Function = TypeVar("Function", bound=Callable[..., object])
Inputs = TypeVar("Inputs")


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
        """The kind of devices of a run with several processes, or ``NO``."""
        # As with Accelerate's launcher, one process that ours has started is not distributed; under torchrun it is.
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
        """Let rank 0 run the block first. The other ranks run it when rank 0 has left it, even by an exception.

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
    def on_process(self, function: object = None, process_index: int | None = None) -> object:
        """Decorate ``function`` (``@on_process(process_index=r)``): it runs on rank ``r`` only, and else returns None.

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
    def split_between_processes(self, inputs: Inputs, apply_padding: bool = False) -> Iterator[Inputs]:
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
    # The first ``extra`` ranks have one more, and so have min(rank, extra) of those before this one.
    start = rank * share + min(rank, extra)
    stop = start + share + (rank < extra)
    # A slice of a ``datasets.Dataset`` is a dictionary of columns, and no dataset.
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
    def run(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs) if condition() else None

    return run  # type: ignore[return-value]


def _decorator(condition: Callable[[], bool], function: Any) -> object:
    if function is not None:
        return _only_if(condition, function)
    return lambda decorated: _only_if(condition, decorated)
