"""The messages of the source: what it gives to exceptions, warnings and logs, and other sentences that people read."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache

from tests.site.plain_english import RIDDLES, VAGUE, words

MOST_WORDS = 30
OWN_WORDS = (
    "that none can",
    "no run can have",
    "one run can have",
    "stands for nothing",
    "as skip says",
    "tells of",
    "told apart",
    "put together",
    "look on already",
    "handed out",
    "hands out",
    "turned away",
    "too coarse",
    "used up",
    "met a",
    "as many as then",
)
"""Words of messages as they were once that neither the field nor the glossary has."""
OURS = re.compile(r"(Config|Usage|Argument|StateReset|Checkpoint|NoCheckpoint|Offload|Control)Error$")
RAISED = re.compile(r"(Error|Exception|Warning|BadParameter)$")
LOGGED = {"warn", "warning", "warning_once", "error", "critical"}
FIELD = "X"
"""Stands for a value that a message gets when it is raised."""


@dataclass(frozen=True)
class Message:
    text: str
    line: int
    is_raised: bool
    """Whether it is the whole text of an exception of Lockstep."""


@cache
def messages(source: str) -> list[Message]:
    """The messages of a module, with ``X`` for each value in them.

    These are the strings in calls of exceptions, ``warnings.warn`` and loggers. Functions that build messages return
    strings, so all other sentences that stand in the code count too.
    """
    tree = ast.parse(source)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    given = {node for call in calls if _reports(call) for node in ast.walk(call)}
    raised = {call.args[0] for call in calls if call.args and OURS.search(_called(call))}
    inside = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = []
    for node in ast.walk(tree):
        text = None if node in docstrings or node in inside else _text(node)
        if text is not None and " " in text and (node in given or _is_sentence(text)):
            found.append(Message(" ".join(text.split()), getattr(node, "lineno", 0), node in raised))
    return found


def problems(message: Message) -> list[str]:
    """Why a message has to be read twice: a long sentence, a riddle, an own word, or nothing about what to do."""
    parts = sentences_of(message.text)
    found = [f"{words(part)} words: {part}" for part in parts if words(part) > MOST_WORDS]
    for phrase in (*RIDDLES, *VAGUE, *OWN_WORDS):
        if re.search(rf"(?<![\w-]){re.escape(phrase)}(?![\w-])", message.text):
            found.append(f"'{phrase}': {message.text}")
    if message.is_raised and message.text.endswith(".") and len(parts) < 2:
        found.append(f"does not say what to do: {message.text}")
    return found


def sentences_of(text: str) -> list[str]:
    """The sentences of a message. A colon and a semicolon end one, and so does a value that may be a sentence."""
    return [part for part in re.split(rf"(?<=[.!?;:])\s+(?=\S)|(?<=\W{FIELD}) (?=[A-Z][a-z])", text) if part]


def _reports(call: ast.Call) -> bool:
    is_method = isinstance(call.func, ast.Attribute)
    return bool(RAISED.search(_called(call))) or (is_method and _called(call) in LOGGED)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(s|d|r|\.\df)", FIELD, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else FIELD for p in node.values)
    return None


def _is_sentence(text: str) -> bool:
    return bool(re.match(r"[A-Z(]", text)) and text.rstrip().endswith(".") and len(text.split()) > 3
