"""Read the pickled files of a source: open, hand to the restricted process, decode what it answers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lockstep.compat.checkpoints.container import Container, FileSlice, find_pickles
from lockstep.compat.checkpoints.isolated import MAX_MESSAGE, RefusedError, unpickle
from lockstep.compat.checkpoints.source import CheckpointSource
from lockstep.compat.checkpoints.tensors import MalformedError, MappedFile, Scratch, UnreadableError
from lockstep.compat.checkpoints.values import decode
from lockstep.errors import CheckpointError
from lockstep.words import escape

MAX_OPEN = 64
# Name, start, length.
FilePart = tuple[str, int, int]


class ForeignReader:
    """The values of the files of one source. What is read stays mapped as long as its tensors live."""

    def __init__(self, source: CheckpointSource) -> None:
        self.source = source
        self.scratch = Scratch()

    def read(self, name: str) -> Any:
        """Return the value of a pickled file. Raises CheckpointError, with the file's name and why."""
        return self.read_all([name])[0]

    def read_all(self, names: Sequence[str]) -> list[Any]:
        """Return the values of pickled files."""
        return self.read_parts([(name, 0, -1) for name in names])

    def read_parts(self, file_parts: Sequence[FilePart]) -> list[object]:
        """Return the values of parts of files; the length -1 reaches to the end."""
        names = list(dict.fromkeys(name for name, _, _ in file_parts))
        values: dict[int, object] = {}
        # In batches, as a process may have only so many files open.
        for at in range(0, len(names), MAX_OPEN):
            batch = set(names[at : at + MAX_OPEN])
            mine = {i: file_part for i, file_part in enumerate(file_parts) if file_part[0] in batch}
            values.update(zip(mine, self._read_batch(list(mine.values())), strict=True))
        return [values[i] for i in range(len(file_parts))]

    def _read_batch(self, file_parts: list[FilePart]) -> list[object]:
        descriptors: dict[str, int] = {}
        try:
            for name, _, _ in file_parts:
                if name not in descriptors:
                    descriptors[name] = self.source.open(name)
            sizes = {name: os.fstat(descriptor).st_size for name, descriptor in descriptors.items()}
            for name, start, length in file_parts:
                if start < 0 or start + max(length, 0) > sizes[name]:
                    raise self.broken(
                        name, f"{length} bytes are read from position {start}, but it has {sizes[name]} bytes"
                    )
            containers = [
                self._container(descriptors[name], sizes[name], part)
                for part in file_parts
                for name in part[:1]
            ]
            answers = unpickle([(one.part.descriptor, one.start, one.pickles) for one in containers])
            files = {
                name: MappedFile(fd, str(self.path(name)), self.scratch) for name, fd in descriptors.items()
            }
            return [
                self._decoded(answer, container, files[name], name)
                for answer, container, (name, _, _) in zip(answers, containers, file_parts, strict=True)
            ]
        except RefusedError as refusal:
            name = file_parts[min(refusal.number, len(file_parts) - 1)][0]
            raise (self.broken if refusal.damaged else self.refused)(name, refusal.reason) from None
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)

    def _container(self, descriptor: int, size: int, file_part: FilePart) -> Container:
        name, start, length = file_part
        try:
            return find_pickles(FileSlice(descriptor, start, size - start if length < 0 else length))
        except UnreadableError as refusal:
            raise self._of(refusal, name) from None

    def _decoded(self, answer: Any, container: Container, file: MappedFile, name: str) -> object:
        try:
            storages = container.storages(answer["storages"], answer["values"], answer["end"], file)
            return decode(container.value(answer["values"], answer["end"]), storages)
        except UnreadableError as refusal:
            raise self._of(refusal, name) from None

    def _of(self, refusal: UnreadableError, name: str) -> CheckpointError:
        is_damaged = isinstance(refusal, MalformedError)
        return (self.broken if is_damaged else self.refused)(name, escape(str(refusal)[:MAX_MESSAGE]))

    def read_safetensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a safetensors file. Raises CheckpointError if it is none."""
        # This refuses a link, and what is no regular file.
        os.close(self.source.open(name))
        try:
            with safe_open(str(self.path(name)), framework="pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not a mapping)
        except (SafetensorError, OSError, ValueError) as error:
            raise self.broken(name, str(error)) from None

    def path(self, name: str) -> Path:
        return self.source.root / name

    def refused(self, name: str, reason: str) -> CheckpointError:
        """Return the error for a file that the restricted process refused."""
        way_out = (
            f"Leave it out with skip ({name!r}) if the run does not need it. Otherwise load it on a machine "
            "where you trust it, and save only tensors and plain values."
            if self.source.is_folder
            else "Load it on a machine where you trust it, and save only the model's state_dict()."
        )
        return CheckpointError(f"{self.path(name)} was refused: {reason}. {way_out}")

    def broken(self, name: str, reason: str) -> CheckpointError:
        """Return the error for a file whose content contradicts itself."""
        return CheckpointError(
            f"{self.path(name)} is damaged, or is not of the kind that its name says: {reason}. Copy it again."
        )
