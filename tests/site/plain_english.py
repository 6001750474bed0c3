"""How easy a page is to read: the words of its sentences, and phrases that must be read twice."""

from __future__ import annotations

import re

RIDDLES = (
    "what lies in no block",
    "as long as it lasts",
    "There is one way in a launch",
    "sends its weights once less",
    "is named once and",
    "that which nobody",
    "what nobody says",
    "lets the ranks part",
    "and is said",
    "is told who",
    "dealt anew",
    "is looked at, and",
    "who is let in",
    "in the midst of",
    "for ever new",
    "the other way round",
)
"""Phrases that readers had to read twice. Say who does what instead."""

VAGUE = ("easily", "simply", "obviously", "of course", "leverage", "seamless", "blazing", "state-of-the-art")
"""Words that say nothing."""


def prose(markdown: str) -> str:
    """The page's running text: without code, tables, headings, links' addresses, pictures and comments."""
    text = re.sub(r"^( *)```.*?^\1```$", "\n", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    skipped = ("|", "#", ":::", "    ", "!", "<")
    text = "\n".join(line for line in text.splitlines() if not line.startswith(skipped))
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"`[^`]*`", "x", text, flags=re.DOTALL)
    return re.sub(r"^ *(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)


def sentences(markdown: str) -> list[str]:
    """The sentences of the running text; what a colon or a semicolon ends counts as one."""
    found = []
    for paragraph in re.split(r"\n\s*\n", prose(markdown)):
        joined = " ".join(paragraph.split())
        found += re.split(r"(?<=[.!?;:])\s+(?=[\w*\[(\"])", joined)
    return [one for one in found if words(one)]


def words(sentence: str) -> int:
    return len(re.findall(r"[^\W_][\w'-]*", sentence))


def introduction(markdown: str) -> str:
    """What stands between the title and the first empty line after its first paragraph."""
    body = markdown.split("\n", 1)[1].strip()
    return " ".join(body.split("\n\n")[0].split())
