"""Python's own reader of pickles, with nothing to call: what it would call becomes a :class:`PickledNode`.

It is the one of the standard library that is written in Python. Of its opcodes
(https://docs.python.org/3/library/pickletools.html) those stay that read plain values and move them about. Those that
look up, call, hash or fill something are replaced here, and the rest are gone: extension codes, out-of-band buffers,
and texts of Python 2 in quotes, which no torch file uses.

It is not torch's ``weights_only`` unpickler, which calls torch's functions with the arguments of a file. So 344 bytes
take 4 GiB, a nested key ends the process, and no checksum is compared. ``docs/importing-checkpoints.md`` has each case,
and ``tests/compat/checkpoints/test_hostile.py`` shows that torch still behaves so.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any, BinaryIO

Operation = Callable[[Any], None]

_PythonUnpickler: Any = pickle._Unpickler


class RefusedFile(Exception):
    """A file holds something that is not read; the text says what."""


class Damaged(RefusedFile):
    """A file is not whole, or contradicts itself."""


class PickledNode:
    """An inert value of a kind that JSON does not have.

    - ``"tuple"``, ``"set"``, ``"frozenset"``: ``items``.
    - ``"dict"``: ``pairs`` of keys and values, as keys of a hostile file are never hashed here.
    - ``"name"``: a module and what the pickle wants of it. Nothing is looked up.
    - ``"call"``: a name, a tuple of arguments, then what was appended; also ``pairs``, and the ``state`` that was set.
    - ``"storage"``: the position of its persistent name in ``Machine.storages``.
    """

    def __init__(self, kind: str, items: list[Any]) -> None:
        self.kind = kind
        self.items = items
        self.pairs: list[tuple[object, object]] = []
        self.state: object = None
        self.has_state = False


class Machine(_PythonUnpickler):
    """Runs the pickles at which ``file`` stands, one by one; afterwards the file stands behind them."""

    def __init__(self, file: BinaryIO) -> None:
        # latin-1 is for strings of Python 2.
        super().__init__(file, encoding="latin-1")
        self.file = file
        self.storages: list[object] = []

    def run(self) -> object:
        """Return the value of the next pickle. Raises RefusedFile for anything that is malformed."""
        try:
            return self.load()
        except KeyError as error:
            opcode = bytes(error.args)
            raise RefusedFile(f"its pickle has the opcode {opcode!r}, which torch does not write") from None
        except (
            pickle.UnpicklingError, EOFError, IndexError, ValueError, struct.error, OverflowError
        ) as error:  # fmt: skip
            raise Damaged(
                f"its pickle is damaged near byte {self.file.tell()} ({type(error).__name__})"
            ) from None

    def find_class(self, module: str, name: str) -> PickledNode:
        """Keep a name as two texts."""
        return PickledNode("name", [module, name])

    def persistent_load(self, identifier: object) -> PickledNode:
        """Keep what a persistent name says."""
        self.storages.append(identifier)
        return PickledNode("storage", [len(self.storages) - 1])

    def top(self, *kinds: str) -> PickledNode:
        """Return the node on top of the stack. Raises RefusedFile if it is not of these kinds."""
        value = self.stack[-1]
        if not isinstance(value, PickledNode) or value.kind not in kinds:
            raise RefusedFile(f"its pickle fills something that is not a {kinds[0]}")
        return value

    def protocol(self) -> None:
        version = self.read(1)[0]
        if version > 5:
            raise RefusedFile(f"it is pickled with protocol {version}, but the newest known is 5")

    # What would call.

    def call(self, target: object, arguments: object) -> None:
        kinds = [
            value.kind if isinstance(value, PickledNode) else type(value).__name__
            for value in (target, arguments)
        ]
        if kinds != ["name", "tuple"]:
            raise RefusedFile(f"its pickle calls a {kinds[0]} with a {kinds[1]}")
        self.append(PickledNode("call", [target, arguments]))

    def _instantiate(self, target: object, arguments: list[object]) -> None:
        # Of INST and OBJ.
        self.call(target, PickledNode("tuple", arguments))

    def reduce(self) -> None:
        arguments = self.stack.pop()
        self.call(self.stack.pop(), arguments)

    def new_object_with_keywords(self) -> None:
        if self.top("dict").pairs:
            raise RefusedFile("its pickle makes an object with keyword arguments")
        self.stack.pop()
        self.reduce()

    def build(self) -> None:
        state = self.stack.pop()
        target = self.top("call")
        if target.has_state:
            raise RefusedFile("its pickle gives an object a second state")
        target.state, target.has_state = state, True

    # What would fill.

    def put_pairs(self, items: list[object]) -> None:
        if len(items) % 2:
            raise RefusedFile("its pickle has a key without a value")
        self.top("dict", "call").pairs.extend(zip(items[::2], items[1::2], strict=True))

    def set_item(self) -> None:
        value = self.stack.pop()
        self.put_pairs([self.stack.pop(), value])

    def new_mapping(self) -> None:
        items = self.pop_mark()
        self.append(PickledNode("dict", []))
        self.put_pairs(items)

    def append_items(self, items: list[object]) -> None:
        target = self.stack[-1]
        (target if isinstance(target, list) else self.top("call").items).extend(items)

    def items_to_mark(self, kind: str) -> None:
        # Before ``append`` is looked up: pop_mark puts another one in its place.
        items = self.pop_mark()
        self.append(PickledNode(kind, items))

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError
        items = self.stack[-count:]
        del self.stack[-count:]
        self.append(PickledNode("tuple", items))

    dispatch: dict[int, Operation] = {
        opcode: _PythonUnpickler.dispatch[opcode]
        for opcode in b"\x95\x8c\x8d\x8e\x8a\x8b\x88\x89\x93\x94.(012NILFJKMGVXUTCB]lQcioghjpqr"
    }
    _REPLACED: dict[bytes, Operation] = {
        b"\x80": protocol,
        b"R": reduce,
        # NEWOBJ has the same operands: a class and a tuple.
        b"\x81": reduce,
        b"\x92": new_object_with_keywords,
        b"b": build,
        b"}": lambda m: m.append(PickledNode("dict", [])),
        b"d": new_mapping,
        b"s": set_item,
        b"u": lambda m: m.put_pairs(m.pop_mark()),
        b"a": lambda m: m.append_items([m.stack.pop()]),
        b"e": lambda m: m.append_items(m.pop_mark()),
        b")": lambda m: m.append(PickledNode("tuple", [])),
        b"t": lambda m: m.items_to_mark("tuple"),
        b"\x85": lambda m: m.tuple_of(1),
        b"\x86": lambda m: m.tuple_of(2),
        b"\x87": lambda m: m.tuple_of(3),
        b"\x8f": lambda m: m.append(PickledNode("set", [])),
        b"\x90": lambda m: m.add_items(m.pop_mark()),
        b"\x91": lambda m: m.items_to_mark("frozenset"),
        # A bytearray, which is bytes here.
        b"\x96": _PythonUnpickler.load_binbytes8,
    }
    dispatch |= {opcode[0]: operation for opcode, operation in _REPLACED.items()}

    def add_items(self, items: list[object]) -> None:
        self.top("set").items.extend(items)
