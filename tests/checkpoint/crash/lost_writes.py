"""What a disk may hold after the power has failed: a model, and the states that it allows.

The model keeps what POSIX promises and no more:

- A file holds what it held when it was last synced. What was written since is there, is not there, or is zeros of the
  right length, as each file system has it.
- A folder holds the names that it had when it was last synced. Of its changes since, any number may be there, but in
  their order: none without those before it. A rename within a folder is one change. Folders are independent: a newer
  change of one may be there without an older change of another.
- Syncing a file brings its content onto the disk, not its name.

A kill of the process loses nothing of this, so that logs of processes that ran one after the other are one log.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from checkpoint.crash.operations import Operation

Tree = dict[str, bytes | None]
"""Files by path with their content; folders with None."""
MOST_COMBINATIONS = 512


@dataclass(eq=False)
class File:
    content: bytes = b""
    synced: bytes = b""

    def choices(self) -> list[bytes]:
        if self.synced == self.content:
            return [self.content]
        return list(dict.fromkeys([self.synced, self.content, bytes(len(self.content))]))


@dataclass(eq=False)
class Folder:
    entries: dict[str, File | Folder] = field(default_factory=dict)
    versions: list[dict[str, File | Folder]] = field(default_factory=lambda: [{}])
    """What it held when it was last synced, and after each change since."""

    def change(self, changed: dict[str, File | Folder | None]) -> None:
        """Set names, and remove those that are None."""
        after = {**self.entries, **changed}
        self.entries = {name: node for name, node in after.items() if node is not None}
        self.versions.append(self.entries)

    def sync(self) -> None:
        self.versions = [self.entries]


class Disk:
    """Replays operations. It starts with an empty folder that is on the disk."""

    def __init__(self) -> None:
        self._root = Folder()

    def do(self, operation: Operation) -> None:
        kind, path, offset = operation.kind, operation.path, operation.offset
        if operation.failed:
            return
        if kind == "sync":
            node = self._at(path)
            if isinstance(node, Folder):
                node.sync()
            else:
                node.synced = node.content
            return
        if kind in ("write", "truncate"):
            file = self._at(path)
            assert isinstance(file, File)
            if kind == "truncate":
                file.content = file.content[:offset].ljust(offset, b"\0")
            else:
                before, after = file.content[:offset], file.content[offset + len(operation.data) :]
                file.content = before.ljust(offset, b"\0") + operation.data + after
            return
        folder, name = self._parent(path)
        if kind == "rename":
            target, new = self._parent(operation.to)
            assert target is folder, "the model has no rename from folder to folder"
            folder.change({name: None, new: folder.entries[name]})
        elif kind in ("unlink", "rmdir"):
            folder.change({name: None})
        elif kind == "mkdir":
            folder.change({name: Folder()})
        elif kind == "open" and name not in folder.entries:
            folder.change({name: File()})

    def tree(self) -> Tree:
        """What a process sees: all that was done."""
        return _tree(self._root, {}, {})

    def after_power_failure(self) -> Iterator[Tree]:
        """Every combination of what may be lost; where these are too many, each choice beside all lost and all kept."""
        folders, files = self._reachable()
        nodes = [*folders, *files]
        choices = [range(len(folder.versions)) for folder in folders]
        choices += [range(len(file.choices())) for file in files]
        count = 1
        for choice in choices:
            count *= len(choice)
        if count <= MOST_COMBINATIONS:
            combinations: Iterator[tuple[int, ...]] = itertools.product(*choices)
        else:
            combinations = _one_by_one(choices)
        for combination in combinations:
            chosen = dict(zip(map(id, nodes), combination, strict=True))
            versions = {id(folder): folder.versions[chosen[id(folder)]] for folder in folders}
            contents = {id(file): file.choices()[chosen[id(file)]] for file in files}
            yield _tree(self._root, versions, contents)

    def _reachable(self) -> tuple[list[Folder], list[File]]:
        """Folders and files that a version may show and of which something may be lost."""
        pending: list[File | Folder] = [self._root]
        seen: dict[int, File | Folder] = {}
        while pending:
            node = pending.pop()
            if id(node) not in seen:
                seen[id(node)] = node
                if isinstance(node, Folder):
                    pending += [inner for version in node.versions for inner in version.values()]
        folders = [node for node in seen.values() if isinstance(node, Folder) and len(node.versions) > 1]
        files = [node for node in seen.values() if isinstance(node, File) and len(node.choices()) > 1]
        return folders, files

    def _at(self, path: str) -> File | Folder:
        node: File | Folder = self._root
        for name in path.split("/") if path != "." else []:
            assert isinstance(node, Folder)
            node = node.entries[name]
        return node

    def _parent(self, path: str) -> tuple[Folder, str]:
        parent, _, name = path.rpartition("/")
        folder = self._at(parent or ".")
        assert isinstance(folder, Folder)
        return folder, name


def _one_by_one(choices: list[range]) -> Iterator[tuple[int, ...]]:
    for extreme in ([0] * len(choices), [len(choice) - 1 for choice in choices]):
        yield tuple(extreme)
        for place, choice in enumerate(choices):
            for value in choice:
                yield (*extreme[:place], value, *extreme[place + 1 :])


def _tree(root: Folder, versions: dict[int, dict[str, File | Folder]], contents: dict[int, bytes]) -> Tree:
    found: Tree = {}
    pending: list[tuple[str, File | Folder]] = [("", root)]
    while pending:
        path, node = pending.pop()
        if isinstance(node, File):
            found[path] = contents.get(id(node), node.content)
            continue
        if path:
            found[path] = None
        for name, inner in versions.get(id(node), node.entries).items():
            pending.append((f"{path}/{name}" if path else name, inner))
    return found
