"""An interpreter of pickle's opcodes that calls nothing but the constructors of ``symbols``.

The opcodes are those of protocols 0 to 5 (https://docs.python.org/3/library/pickletools.html), without
extension codes, out-of-band buffers and textual byte strings, which no torch file uses.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Protocol

from .arguments import Symbol
from .nodes import Damaged, Items, Mapping, Refused
from .symbols import build, symbol

MAX_INT_BYTES = 64
MAX_LINE = 4096
PersistentLoad = Callable[[Any], Any]


class Data(Protocol):
    """Bytes, or what reads them piecemeal."""

    def __len__(self) -> int: ...

    def __getitem__(self, wanted: slice, /) -> bytes: ...

    def find(self, text: bytes, start: int, stop: int, /) -> int: ...


class Machine:
    """Runs one pickle from ``data[position:]``; ``position`` is behind it afterwards."""

    def __init__(self, data: Data, position: int, persistent_load: PersistentLoad) -> None:
        self.data = data
        self.position = position
        self.persistent_load = persistent_load
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []  # the stacks below each MARK
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The value. Raises Refused for anything that is malformed or not allowed."""
        try:
            while True:
                opcode = self.take(1)
                if opcode == b".":
                    return self.pop()
                operation = _OPERATIONS.get(opcode)
                if operation is None:
                    raise Refused(f"its pickle has the opcode {opcode!r}, which torch does not write")
                operation(self)
        except (IndexError, ValueError, struct.error, UnicodeError, OverflowError) as error:
            raise Damaged(
                f"its pickle is damaged near byte {self.position} ({type(error).__name__})"
            ) from None

    # reading

    def take(self, length: int) -> bytes:
        end = self.position + length
        if length < 0 or end > len(self.data):
            raise Damaged(f"its pickle ends at byte {len(self.data)}, but goes on to byte {end}")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def number(self, code: str) -> int:
        return int(struct.unpack(code, self.take(struct.calcsize(code)))[0])

    def line(self) -> str:
        return self.line_of_bytes().decode("utf-8")

    def line_of_bytes(self) -> bytes:
        end = self.data.find(b"\n", self.position, self.position + MAX_LINE)
        if end < 0:
            raise Refused(f"its pickle has a line of more than {MAX_LINE} bytes")
        return self.take(end + 1 - self.position)[:-1]

    # the stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.outer.pop()
        return items

    def mark(self) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def top(self, kind: type) -> Any:
        value = self.stack[-1]
        if not isinstance(value, kind):
            raise Refused(f"its pickle fills a {type(value).__name__} as if it were a {kind.__name__}")
        return value

    # operations that are more than a line

    def drop(self) -> None:
        if self.stack:
            self.pop()
        else:
            self.pop_mark()

    def put_pairs(self, items: list[Any]) -> None:
        if len(items) % 2:
            raise Refused("its pickle has a key without a value")
        self.top(Mapping).pairs.extend(zip(items[::2], items[1::2], strict=True))

    def set_item(self) -> None:
        value = self.pop()
        self.put_pairs([self.pop(), value])

    def new_mapping(self) -> None:
        items = self.pop_mark()
        self.push(Mapping())
        self.put_pairs(items)

    def append_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        target = target.items if isinstance(target, Items) and target.kind == "deque" else self.top(list)
        target.extend(items)

    def append(self) -> None:
        value = self.pop()
        self.append_items([value])

    def add_items(self) -> None:
        items = self.pop_mark()
        target = self.top(Items)
        if target.kind != "set":
            raise Refused(f"its pickle adds to a {target.kind}")
        target.items.extend(items)

    def find(self, module: str, name: str) -> None:
        self.push(symbol(module, name))

    def find_on_stack(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise Refused("its pickle names a global by something other than two strings")
        self.find(module, name)

    def call(self, target: Any, arguments: Any) -> None:
        if not isinstance(target, Symbol):
            raise Refused(f"its pickle calls a {type(target).__name__}")
        if not isinstance(arguments, Items) or arguments.kind != "tuple":
            raise Refused(f"its pickle calls {target.name} with arguments that are not a tuple")
        self.push(target.make(arguments.items))

    def reduce(self) -> None:
        arguments = self.pop()
        self.call(self.pop(), arguments)

    def new_object_with_keywords(self) -> None:
        keywords = self.pop()
        if not isinstance(keywords, Mapping) or keywords.pairs:
            raise Refused("its pickle makes an object with keyword arguments")
        self.reduce()

    def instance(self) -> None:
        arguments = self.pop_mark()
        self.call(symbol(self.line(), self.line()), Items("tuple", arguments))

    def object(self) -> None:
        target, *arguments = self.pop_mark()
        self.call(target, Items("tuple", arguments))

    def build(self) -> None:
        state = self.pop()
        build(self.stack[-1], state)

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError
        items = self.stack[-count:]
        del self.stack[-count:]
        self.push(Items("tuple", items))

    def get(self, key: int) -> None:
        if key not in self.memo:
            raise Refused(f"its pickle uses value {key} before it is there")
        self.push(self.memo[key])

    def long(self, length: int) -> None:
        if length > MAX_INT_BYTES:
            raise Refused(f"its pickle has an integer of {length} bytes")
        self.push(int.from_bytes(self.take(length), "little", signed=True))

    def text_int(self) -> None:
        line = self.line()
        if line in ("00", "01"):  # what protocol 0 wrote for False and True
            self.push(line == "01")
        elif len(line) > 3 * MAX_INT_BYTES:
            raise Refused(f"its pickle has an integer of {len(line)} digits")
        else:
            self.push(int(line.removesuffix("L")))

    def frame(self) -> None:
        length = self.number("<Q")
        if length > len(self.data) - self.position:
            raise Damaged(f"its pickle announces {length} bytes, but has {len(self.data) - self.position}")

    def protocol(self) -> None:
        version = self.number("<B")
        if version > 5:
            raise Refused(f"it is pickled with protocol {version}, but the newest known is 5")


def _utf8(code: str) -> Callable[[Machine], None]:
    return lambda m: m.push(m.take(m.number(code)).decode("utf-8", "surrogatepass"))


def _raw(code: str) -> Callable[[Machine], None]:
    return lambda m: m.push(m.take(m.number(code)))


def _latin1(code: str) -> Callable[[Machine], None]:
    """Strings of Python 2."""
    return lambda m: m.push(m.take(m.number(code)).decode("latin-1"))


_OPERATIONS: dict[bytes, Callable[[Machine], None]] = {
    b"\x80": Machine.protocol,
    b"\x95": Machine.frame,
    b"(": Machine.mark,
    b"0": Machine.drop,
    b"1": lambda m: void(m.pop_mark()),
    b"2": lambda m: m.push(m.stack[-1]),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"I": Machine.text_int,
    b"L": Machine.text_int,
    b"F": lambda m: m.push(float(m.line())),
    b"J": lambda m: m.push(m.number("<i")),
    b"K": lambda m: m.push(m.number("<B")),
    b"M": lambda m: m.push(m.number("<H")),
    b"\x8a": lambda m: m.long(m.number("<B")),
    b"\x8b": lambda m: m.long(m.number("<i")),
    b"G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    b"V": lambda m: m.push(m.line_of_bytes().decode("raw-unicode-escape")),
    b"X": _utf8("<I"),
    b"\x8c": _utf8("<B"),
    b"\x8d": _utf8("<Q"),
    b"U": _latin1("<B"),
    b"T": _latin1("<i"),
    b"C": _raw("<B"),
    b"B": _raw("<I"),
    b"\x8e": _raw("<Q"),
    b"\x96": _raw("<Q"),
    b")": lambda m: m.push(Items("tuple", [])),
    b"t": lambda m: m.push(Items("tuple", m.pop_mark())),
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"]": lambda m: m.push([]),
    b"l": lambda m: m.push(m.pop_mark()),
    b"a": Machine.append,
    b"e": lambda m: m.append_items(m.pop_mark()),
    b"}": lambda m: m.push(Mapping()),
    b"d": Machine.new_mapping,
    b"s": Machine.set_item,
    b"u": lambda m: m.put_pairs(m.pop_mark()),
    b"\x8f": lambda m: m.push(Items("set", [])),
    b"\x90": Machine.add_items,
    b"\x91": lambda m: m.push(Items("frozenset", m.pop_mark())),
    b"c": lambda m: m.find(m.line(), m.line()),
    b"\x93": Machine.find_on_stack,
    b"R": Machine.reduce,
    b"\x81": Machine.reduce,  # NEWOBJ has the same operands: a class and a tuple
    b"\x92": Machine.new_object_with_keywords,
    b"i": Machine.instance,
    b"o": Machine.object,
    b"b": Machine.build,
    b"Q": lambda m: m.push(m.persistent_load(m.pop())),
    b"g": lambda m: m.get(int(m.line())),
    b"h": lambda m: m.get(m.number("<B")),
    b"j": lambda m: m.get(m.number("<I")),
    b"p": lambda m: m.memo.update({int(m.line()): m.stack[-1]}),
    b"q": lambda m: m.memo.update({m.number("<B"): m.stack[-1]}),
    b"r": lambda m: m.memo.update({m.number("<I"): m.stack[-1]}),
    b"\x94": lambda m: m.memo.update({len(m.memo): m.stack[-1]}),
}


def void(_: Any) -> None:
    """For operations that only drop what they took."""
