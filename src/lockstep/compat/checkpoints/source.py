"""The file or folder that is imported: what is in it, opened without following links out of it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from lockstep.errors import CheckpointError, UsageError

MAX_NAMES = 100_000


class CheckpointSource:
    """Names are relative to the folder, with ``/``; of a single file, its own name.

    A link, a device or anything else that is neither a regular file nor a folder is refused when it is opened.
    """

    def __init__(self, path: str | os.PathLike[str], skip: Iterable[str] = ()) -> None:
        """List what is there. Raises CheckpointError for nothing, UsageError for a ``skip`` that is not there."""
        # Unlike Path.expanduser, this keeps ~nobody.
        self.path = Path(os.path.expanduser(path))
        if not self.path.exists():
            raise CheckpointError(f"There is no file or folder {self.path}. Pass the checkpoint to import.")
        self.is_folder = self.path.is_dir()
        self.root = self.path if self.is_folder else self.path.parent
        self._all = self._walk() if self.is_folder else [self.path.name]
        self.skipped: dict[str, bool] = {}
        for name in skip:
            found = [
                entry for entry in self._all if entry == name or entry.startswith(name.rstrip("/") + "/")
            ]
            if not found or not self.is_folder:
                raise UsageError(
                    f"skip names {name!r}, which is not in {self.path}. Name files or folders as they are there, such "
                    f"as {self._all[:3]}."
                )
            self.skipped.update(dict.fromkeys(found, False))
        self.names = [name for name in self._all if name not in self.skipped]

    def _walk(self) -> list[str]:
        names: list[str] = []
        for folder, folders, files in os.walk(self.root):
            # os.walk lists links to folders as folders, without following them; opening them is refused.
            linked = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            base = os.path.relpath(folder, self.root)
            names += [name if base == "." else f"{base}/{name}" for name in files + linked]
            if len(names) > MAX_NAMES:
                raise CheckpointError(
                    f"{self.root} has more than {MAX_NAMES} files. Pass one checkpoint's folder."
                )
        return sorted(names)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def matching(self, pattern: str) -> dict[tuple[str, ...], str]:
        """Return the names that match the whole regular expression, by its groups."""
        matches = {name: re.fullmatch(pattern, name) for name in self.names}
        found = {match.groups(""): name for name, match in matches.items() if match}
        return dict(sorted(found.items()))

    def numbered(self, pattern: str) -> list[str]:
        """Return the names of a series, whose group is ``""`` or a number: ``optimizer(_1)?.bin``. No gaps.

        Raises:
            CheckpointError: a number is missing and was not skipped.
        """
        by_number = {
            int((groups[0] or "0").strip("_")): name for groups, name in self.matching(pattern).items()
        }
        skipped = {re.fullmatch(pattern, name) for name in self.skipped}
        gone = {int((match.group(1) or "0").strip("_")) for match in skipped if match}
        missing = sorted(set(range(max(by_number, default=-1))) - by_number.keys() - gone)
        if missing:
            raise CheckpointError(
                f"{self.path} has {sorted(by_number.values())}, but the file with number {missing[0]} is "
                "missing. Copy the whole folder again."
            )
        return [by_number[number] for number in sorted(by_number)]

    def below(self, folder: str) -> list[str]:
        """Return the names of the files that lie in ``folder``, without it; ``""`` is the top."""
        prefix = folder + "/" if folder else ""
        rest = [name.removeprefix(prefix) for name in self.names if name.startswith(prefix)]
        return [name for name in rest if "/" not in name]

    def open(self, name: str) -> int:
        """Return a descriptor of a regular file, to be closed by the caller.

        Raises:
            CheckpointError: it is a link or no regular file, or cannot be opened.
        """
        if name not in self.names:
            raise CheckpointError(f"{self.path} has no file {name!r}. Copy the whole checkpoint again.")
        try:
            # The user has named a single file, and may name a link. Links to folders were listed, not followed.
            follow = os.O_NOFOLLOW if self.is_folder else 0
            # Without O_NONBLOCK a named pipe would wait for its writer.
            descriptor = os.open(self.root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | follow)
        except OSError as error:
            if (self.root / name).is_symlink():
                raise CheckpointError(
                    f"{self.root / name} is a link, which may point outside the checkpoint. Copy the checkpoint "
                    "with its files (cp -L)."
                ) from None
            raise CheckpointError(
                f"{self.root / name} cannot be opened: {error.strerror}. Check its permissions."
            ) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError(f"{self.root / name} is not a regular file. Copy the checkpoint again.")
        return descriptor

    def text(self, name: str, limit: int = 2**26) -> str:
        """Return the text of a small file. Raises CheckpointError if it is none."""
        descriptor = self.open(name)
        with open(descriptor, "rb") as file:
            data = file.read(limit + 1)
        try:
            if len(data) <= limit:
                return data.decode("utf-8")
        except UnicodeDecodeError:
            pass
        raise CheckpointError(f"{self.root / name} is not a small text file. Copy the checkpoint again.")
