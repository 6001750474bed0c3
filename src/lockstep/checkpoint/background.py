"""Saving while training goes on: a copy in host memory, and one thread that writes it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from lockstep.checkpoint.format.tensorfile import TensorFile
from lockstep.checkpoint.store.verify import in_parallel
from lockstep.comm.collectives import Communicator
from lockstep.comm.dtensor import local
from lockstep.errors import CheckpointError
from lockstep.runtime.process import Runtime

logger = logging.getLogger("lockstep.checkpoint")


class HostCopies:
    """Memory for one copy of what this rank writes, kept from save to save.

    Fresh memory is an order of magnitude slower to fill than memory that was used before.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies.values())

    @torch.no_grad()
    def take(self, files: dict[str, TensorFile]) -> dict[str, TensorFile]:
        """The files with copies of their tensors, complete when this returns."""
        before, self._copies = self._copies, {}
        devices, on_host = set(), []
        for file, content in files.items():
            for key, tensor in content.tensors.items():
                source = local(tensor.detach())
                copy = before.pop((file, key), None)
                if copy is None or copy.shape != source.shape or copy.dtype != source.dtype:
                    copy = _host_memory(source)
                self._copies[file, key] = copy
                if source.device.type == "cpu":
                    on_host.append((copy, source))
                else:
                    copy.copy_(source, non_blocking=True)
                    devices.add(source.device)
        in_parallel(lambda pair: pair[0].copy_(pair[1]), on_host)
        for device in devices:
            torch.accelerator.synchronize(device)
        return {
            file: TensorFile({key: self._copies[file, key] for key in content.tensors})
            for file, content in files.items()
        }


def _host_memory(source: torch.Tensor) -> torch.Tensor:
    pinned = source.device.type == "cuda"
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)


class Background:
    """At most one save at a time, in a thread of its own; the process does not end before it does."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._communicator: Communicator | None = None
        self._what = ""
        self.copies = HostCopies()

    def communicator(self) -> Communicator:
        """Collectives over a group of their own, as training uses the main one; made once, by all ranks together."""
        if self._communicator is None:
            group = dist.new_group(backend="gloo") if self._runtime.world_size > 1 else None
            self._communicator = Communicator(replace(self._runtime, backend="gloo"), group)
        return self._communicator

    def start(self, work: Callable[[], None], what: str) -> None:
        """Run ``work``, which saves ``what``; ``wait`` must have been called since the last start."""
        assert self._thread is None
        self._what = what

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._failure = error
                logger.error("%s was not saved: %s", what, error)

        self._thread = threading.Thread(target=run, name="lockstep-save", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the running save, if there is one.

        Raises:
            CheckpointError: it failed, on this or another rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(
                f"{self._what}, which was being saved in the background, was not saved: {failure}"
            ) from failure
