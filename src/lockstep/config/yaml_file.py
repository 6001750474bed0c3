"""YAML read defensively: plain data with the line of every key, and limits on size and depth."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from lockstep.config.files import JsonObject, read_text
from lockstep.errors import ConfigError

MAX_YAML_BYTES = 64 * 1024
MAX_DEPTH = 16
MAX_NODES = 1024  # PyYAML reads some thousand in a second

KeyPath = tuple[str, ...]


def _tags(*names: str) -> frozenset[str]:
    return frozenset("tag:yaml.org,2002:" + name for name in names)


BUILT = _tags("null", "bool", "int", "float", "str")
AS_TEXT = _tags("timestamp")
NUMBERS = _tags("int", "float")
# what only YAML 1.1 takes for numbers: 1:30 for 90 (sixties), 1_0 for 10, 010 for 8 (octal)
NOT_TODAY = re.compile(r".*[:_].*|[-+]?0[0-9]+")
NULL, NULL_WORDS = _tags("null"), ("", "~", "null", "Null", "NULL")
MAP, SEQUENCE = _tags("map"), _tags("seq")


@dataclass(frozen=True)
class YamlFile:
    """The mapping in a YAML file; ``lines`` maps the path of each key to its line, counted from 1."""

    name: str
    data: JsonObject
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def at(self, *path: str) -> str:
        """Return the place of a key as ``file:line: key`` for a message."""
        where = f"{self.name}:{self.lines[path]}" if path in self.lines else self.name
        return f"{where}: {'.'.join(path)}" if path else where


def read_yaml(path: str | Path) -> YamlFile:
    """Read a file whose top level is a mapping.

    Raises:
        ConfigError: the file is missing, unreadable, not UTF-8 text, too large or too deep, not YAML, has a
            duplicate key, an alias or a tag of an object.
    """
    name = str(path)
    if name.endswith(".py"):
        raise ConfigError(f"{name} is a script, not a configuration file. Name a YAML or JSON file.")
    text = read_text(path, MAX_YAML_BYTES, "YAML")
    return parse_yaml(text, name)


def parse_yaml(text: str, name: str) -> YamlFile:
    """Read a YAML text as :func:`read_yaml` reads a file; ``name`` appears in messages."""
    try:
        loader = _BoundedLoader(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        problem = error.problem or error.context or "malformed"
        raise ConfigError(f"{name}:{line}: not valid YAML: {_short(problem)}. Correct this line.") from None
    except yaml.YAMLError as error:
        problem = str(error).splitlines()[0]
        raise ConfigError(f"{name}: not valid YAML: {_short(problem)}. Give a YAML text file.") from None
    except ValueError:  # PyYAML on escapes beyond Unicode
        raise ConfigError(
            f"{name}: not valid YAML: an escape sequence does not stand for a character. Correct it."
        ) from None
    if root is None:
        raise ConfigError(f"{name}: the file is empty. Write one with `lockstep config`.")
    if not isinstance(root, MappingNode):
        raise ConfigError(
            f"{name}:1: the top level must be `key: value` lines. Write one with `lockstep config`."
        )
    lines: dict[KeyPath, int] = {}
    return YamlFile(name, _mapping(root, (), name, lines), lines)


class _BoundedLoader(yaml.SafeLoader):
    """Stops at the first alias, or when nodes are too many or too deep, before anything is built."""

    depth = 0
    nodes = 0

    def fetch_flow_collection_start(self, token_class: object) -> None:
        # here, because the scanner looks far ahead, in a time that grows with the square of the depth
        if self.flow_level > MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"nested deeper than {MAX_DEPTH}", problem_mark=self.get_mark()
            )
        super().fetch_flow_collection_start(token_class)

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        event = self.peek_event()
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases (*name) are not allowed", problem_mark=event.start_mark
            )
        self.depth += 1
        self.nodes += 1
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"nested deeper than {MAX_DEPTH}", problem_mark=event.start_mark
            )
        if self.nodes > MAX_NODES:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_NODES} values", problem_mark=event.start_mark)
        node: Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _mapping(node: MappingNode, path: KeyPath, name: str, lines: dict[KeyPath, int]) -> dict[str, object]:
    data: dict[str, object] = {}
    _check_tag(node, name)
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, ScalarNode) or not key_node.value:
            raise ConfigError(f"{name}:{line}: a key must be a word. Correct this line.")
        _check_tag(key_node, name)
        key = key_node.value
        here = (*path, key)
        if key in data:
            raise ConfigError(
                f"{name}:{line}: {_short(key)} is given twice, first in line {lines[here]}. Remove one of them."
            )
        lines[here] = line
        data[key] = _value(value_node, here, name, lines)
    return data


def _value(node: Node, path: KeyPath, name: str, lines: dict[KeyPath, int]) -> object:
    if isinstance(node, MappingNode):
        return _mapping(node, path, name, lines)
    _check_tag(node, name)
    if isinstance(node, SequenceNode):
        return [_value(item, path, name, lines) for item in node.value]
    if node.tag in NUMBERS and NOT_TODAY.fullmatch(node.value):
        return node.value
    try:
        if node.tag in NULL and node.value not in NULL_WORDS:  # which PyYAML does not look at
            raise ValueError
        return yaml.SafeLoader("").construct_object(node) if node.tag in BUILT else node.value
    except (ValueError, yaml.YAMLError, KeyError, IndexError):  # `!!int x`, or thousands of digits
        at = f"{name}:{node.start_mark.line + 1}: {'.'.join(path)}"
        kind = node.tag.rpartition(":")[2]
        raise ConfigError(f"{at}: {_short(repr(node.value))} is not a valid {kind}. Correct it.") from None


def _check_tag(node: Node, name: str) -> None:
    """Refuse every tag but those that YAML resolves by itself from plain values."""
    allowed: frozenset[str] = BUILT | AS_TEXT
    if isinstance(node, MappingNode):
        allowed = MAP
    elif isinstance(node, SequenceNode):
        allowed = SEQUENCE
    if node.tag not in allowed:
        line = node.start_mark.line + 1
        raise ConfigError(f"{name}:{line}: the tag {_short(node.tag)} is not allowed. Write plain values.")


def _short(text: str) -> str:
    clean = "".join(character if character.isprintable() else "?" for character in text)
    return clean if len(clean) <= 80 else clean[:77] + "..."
