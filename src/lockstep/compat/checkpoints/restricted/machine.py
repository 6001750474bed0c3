"""Python's own reader of pickles, with nothing to call but the constructors of ``symbols``.

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

from .nodes import Damaged, Items, Mapping, RefusedFile, Symbol
from .symbols import build, symbol

PersistentLoad = Callable[[object], Any]
Operation = Callable[[Any], None]

_PythonUnpickler: Any = pickle._Unpickler


class Machine(_PythonUnpickler):
    """Runs the pickle at which ``file`` stands; afterwards the file stands behind it."""

    def __init__(self, file: BinaryIO, persistent_load: PersistentLoad) -> None:
        # latin-1 is for strings of Python 2.
        super().__init__(file, encoding="latin-1")
        self.file = file
        self.persistent_load = persistent_load

    def run(self) -> object:
        """The value. Raises RefusedFile for anything that is malformed or not allowed."""
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

    def find_class(self, module: str, name: str) -> object:
        """A name is compared with the list, never looked up."""
        return symbol(module, name)

    def top(self, kind: type) -> Any:
        value = self.stack[-1]
        if not isinstance(value, kind):
            raise RefusedFile(f"its pickle fills a {type(value).__name__} as if it were a {kind.__name__}")
        return value

    def protocol(self) -> None:
        version = self.read(1)[0]
        if version > 5:
            raise RefusedFile(f"it is pickled with protocol {version}, but the newest known is 5")

    # What calls.

    def call(self, target: object, arguments: object) -> None:
        if not isinstance(target, Symbol):
            raise RefusedFile(f"its pickle calls a {type(target).__name__}")
        if not isinstance(arguments, Items) or arguments.kind != "tuple":
            raise RefusedFile(f"its pickle calls {target.name} with arguments that are not a tuple")
        self.append(target.make(arguments.items))

    def _instantiate(self, target: object, arguments: list[object]) -> None:
        """Of INST and OBJ."""
        self.call(target, Items("tuple", arguments))

    def reduce(self) -> None:
        arguments = self.stack.pop()
        self.call(self.stack.pop(), arguments)

    def new_object_with_keywords(self) -> None:
        keywords = self.stack.pop()
        if not isinstance(keywords, Mapping) or keywords.pairs:
            raise RefusedFile("its pickle makes an object with keyword arguments")
        self.reduce()

    def build(self) -> None:
        state = self.stack.pop()
        build(self.stack[-1], state)

    # What fills: nothing of a file is hashed here.

    def put_pairs(self, items: list[object]) -> None:
        if len(items) % 2:
            raise RefusedFile("its pickle has a key without a value")
        self.top(Mapping).pairs.extend(zip(items[::2], items[1::2], strict=True))

    def set_item(self) -> None:
        value = self.stack.pop()
        self.put_pairs([self.stack.pop(), value])

    def new_mapping(self) -> None:
        items = self.pop_mark()
        self.append(Mapping())
        self.put_pairs(items)

    def append_items(self, items: list[object]) -> None:
        target = self.stack[-1]
        target = target.items if isinstance(target, Items) and target.kind == "deque" else self.top(list)
        target.extend(items)

    def add_items(self) -> None:
        items = self.pop_mark()
        target = self.top(Items)
        if target.kind != "set":
            raise RefusedFile(f"its pickle adds to a {target.kind}")
        target.items.extend(items)

    def items_to_mark(self, kind: str) -> None:
        # Before ``append`` is looked up: pop_mark puts another one in its place.
        items = self.pop_mark()
        self.append(Items(kind, items))

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError
        items = self.stack[-count:]
        del self.stack[-count:]
        self.append(Items("tuple", items))

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
        b"}": lambda m: m.append(Mapping()),
        b"d": new_mapping,
        b"s": set_item,
        b"u": lambda m: m.put_pairs(m.pop_mark()),
        b"a": lambda m: m.append_items([m.stack.pop()]),
        b"e": lambda m: m.append_items(m.pop_mark()),
        b")": lambda m: m.append(Items("tuple", [])),
        b"t": lambda m: m.items_to_mark("tuple"),
        b"\x85": lambda m: m.tuple_of(1),
        b"\x86": lambda m: m.tuple_of(2),
        b"\x87": lambda m: m.tuple_of(3),
        b"\x8f": lambda m: m.append(Items("set", [])),
        b"\x90": add_items,
        b"\x91": lambda m: m.items_to_mark("frozenset"),
        # A bytearray, which is bytes here.
        b"\x96": _PythonUnpickler.load_binbytes8,
    }
    dispatch |= {opcode[0]: operation for opcode, operation in _REPLACED.items()}
