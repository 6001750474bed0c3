"""Parameters on a device, stepped in host memory: gradients come to the host, and new values go back, beside the
computation.

Reference: Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, USENIX ATC 2021.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.hooks import RemovableHandle

from lockstep.comm.dtensor import is_dtensor
from lockstep.comm.tree import StateDict
from lockstep.errors import UsageError
from lockstep.offload.copies import Copies, Event, HostPool, dense_strides, view_of
from lockstep.offload.files.direct import OffloadFile, aligned
from lockstep.offload.optimizer.states import write_tensor
from lockstep.torch_internals import tensors as torch_tensors


@dataclass(frozen=True)
class FetchedGradient:
    """A gradient on its way to the host: in ``host`` once ``event`` has come; ``buffer`` is its memory."""

    host: torch.Tensor
    event: Event
    buffer: torch.Tensor


@dataclass(frozen=True)
class _EarlyCopy:
    """A copy that was begun when a gradient appeared; good as long as the gradient is this one, unchanged."""

    gradient: weakref.ref[torch.Tensor]
    version: int
    fetched: FetchedGradient


class HostSide:
    """Copies of a device's parameters in host memory, or in a file, which are stepped in their place.

    Gradients are copied to (pinned) host memory as they appear in backward. One that is changed afterwards, by
    clipping, a loss scaler or the user, is copied again at ``step``.

    Args:
        parameters: Those on other devices than ``device`` are left out.
        copies: To and from ``device``.
        folder: Where the copies of parameters are kept; None for host memory.

    Raises:
        UsageError: A parameter is a shard (DTensor).
        OffloadError: There is too little space in ``folder``, or it cannot be written to.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], device: torch.device, folder: Path | None, copies: Copies
    ) -> None:
        self._device = device.type
        self.copies = copies
        self._pool = HostPool(copies)
        self._lock = threading.Lock()
        self._masters: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        self._early: dict[int, _EarlyCopy] = {}
        self._handles: list[RemovableHandle] = []
        self._folder = folder
        parameters = [p for p in parameters if p.requires_grad and self.serves(p)]
        for parameter in parameters:
            if is_dtensor(parameter):
                raise UsageError(
                    f"A parameter of shape {tuple(parameter.shape)} is sharded over devices, so its step alone "
                    "cannot be moved to host memory. Offload parameters too, or leave offload out."
                )
        self.files: list[OffloadFile] = []
        if folder is not None:
            self.files.append(OffloadFile(folder, sum(aligned(p.nbytes) for p in parameters)))
        for parameter in parameters:
            self._add(parameter)

    def _add(self, parameter: torch.Tensor) -> None:
        nbytes = aligned(parameter.nbytes)
        flat = self.copies.host_bytes(nbytes)
        master = _like(flat, parameter).copy_(parameter.detach())
        if self._folder is not None and parameter.numel():
            # A group was added.
            if self.files[-1].free_bytes < nbytes:
                self.files.append(OffloadFile(self._folder, nbytes))
            file = self.files[-1]
            offset = file.place(nbytes)
            write_tensor(file, offset, master)
            master = _like(file.tensor(offset, (nbytes,), torch.uint8), parameter)
        self._masters[id(parameter)] = master
        self._versions[id(parameter)] = torch_tensors.version(parameter)
        self._handles.append(parameter.register_post_accumulate_grad_hook(self._appeared))

    def serves(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is on this device."""
        return parameter.device.type == self._device

    def begin(self) -> None:
        """Begin at ``step``, in the thread that computes: copies from now on come after what was computed by now."""
        self.copies.follow()
        self.copies.after(self.copies.computed())

    @torch.no_grad()
    def master(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the copy that is stepped, of the parameter's shape and with its value of now."""
        if id(parameter) not in self._masters:
            self._add(parameter)
        master = self._masters[id(parameter)]
        # It was loaded, or changed by the user.
        if self._versions[id(parameter)] != torch_tensors.version(parameter):
            master.copy_(parameter)
            self.note_version(parameter)
        return master

    def note_version(self, parameter: torch.Tensor) -> None:
        """Note that what was changed by now in a parameter is, or will be, in its copy."""
        self._versions[id(parameter)] = torch_tensors.version(parameter)

    @torch.no_grad()
    def _appeared(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided:
            return
        # In backward this is a thread of autograd's own.
        self.copies.follow()
        self.copies.after(self.copies.computed())
        # What was copied of it in an earlier micro-batch is of no use; copies are made in order.
        self._drop_early(parameter)
        fetched = self._fetch(gradient.detach())
        self._early[id(parameter)] = _EarlyCopy(
            weakref.ref(gradient), torch_tensors.version(gradient), fetched
        )

    def _drop_early(self, parameter: torch.Tensor) -> None:
        early = self._early.pop(id(parameter), None)
        if early is not None:
            self.release(early.fetched)

    @torch.no_grad()
    def fetch(
        self, parameter: torch.Tensor, watched: torch.Tensor, gradient: torch.Tensor
    ) -> FetchedGradient:
        """Begin to copy a gradient, of its parameter's shape, to the host, unless that was done when it appeared.
        ``watched``: as in ``Entry``."""
        early = self._early.get(id(parameter))
        if (
            early is not None
            and early.gradient() is watched
            and early.version == torch_tensors.version(watched)
        ):
            return self._early.pop(id(parameter)).fetched
        self._drop_early(parameter)
        return self._fetch(gradient)

    def _fetch(self, gradient: torch.Tensor) -> FetchedGradient:
        with self._lock:
            buffer = self._pool.take(aligned(gradient.nbytes))
        host = _like(buffer, gradient)
        self.copies.copy(host, gradient)
        return FetchedGradient(host, self.copies.copied(), buffer)

    def arrived(self, fetched: FetchedGradient) -> torch.Tensor:
        """Return the gradient, when it is on the host."""
        self.copies.wait(fetched.event)
        return fetched.host

    def release(self, fetched: FetchedGradient) -> None:
        """Take back the memory of a gradient that has been used."""
        with self._lock:
            self._pool.give_back(fetched.buffer)

    @torch.no_grad()
    def publish(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Begin to copy a new ``value``, of its shape, to the device. It must be kept until ``copied`` has come."""
        self.copies.copy(parameter.data, value)

    def compute_after(self, event: Event) -> None:
        """Make the device wait for copies before what it is given to compute from now on."""
        self.copies.follow()
        self.copies.compute_after(event)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


@dataclass(frozen=True)
class _HostTensor:
    """A tensor that torch is not to move to the device of its parameter."""

    tensor: torch.Tensor


def keep_on_host(state_dict: StateDict) -> dict[str, object]:
    """Return a state_dict whose tensors, numbers excepted, ``load_state_dict`` leaves where they are; see
    ``take_kept``.
    """
    state = {
        index: {
            name: _HostTensor(v) if isinstance(v, torch.Tensor) and v.dim() else v for name, v in own.items()
        }
        if isinstance(own, dict)
        else own
        for index, own in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def take_kept(parameter: torch.Tensor, state: dict[str, object]) -> None:
    """Bring a parameter's state to the host, with the dtypes that ``load_state_dict`` would give it."""
    for name, value in state.items():
        if isinstance(value, _HostTensor):
            value = value.tensor
            if parameter.is_floating_point():
                value = value.to(dtype=parameter.dtype)
        if isinstance(value, torch.Tensor):
            state[name] = value.to("cpu")


def _like(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape, dtype and order of dimensions in given bytes."""
    return view_of(flat, tensor.dtype, tensor.shape, dense_strides(tensor))
