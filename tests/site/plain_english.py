"""How easy a page is to read: the words of its sentences, and phrases that must be read twice."""

from __future__ import annotations

import re

RIDDLES = (
    # from the pages as they were once
    "what lies in no block",
    "as long as it lasts",
    "There is one way in a launch",
    "sends its weights once less",
    "is named once and",
    "what nobody says",
    "lets the ranks part",
    "let the ranks part",
    "dealt anew",
    "who is let in",
    "in the midst of",
    "the other way round",
    "the numbers part",
    "are no matter",
    "are its own affair",
    "is its own matter",
    "is not to be told",
    "where nobody chose",
    # passive sentences without a subject that anybody could name
    "is said",
    "are said",
    "is told",
    "are told",
    "is looked at",
    "are looked at",
    "looked at again",
    "says of",
    # words for "no person", "the same", "again", "free", "between uses", "in addition"
    "nobody",
    "whoever",
    "everybody",
    "anybody",
    "likewise",
    "anew",
    "for ever",
    "let go",
    "lets go",
    "at rest",
    "on top",
    "dealt",
    # pronouns without a noun
    "that which",
    "such ones",
    "which see",
    "of ours",
    "one of ours",
    "is what",
    "what is left",
    "no more than what",
    "by what it",
    "but for the",
    "in the place of",
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


def riddles(markdown: str) -> list[str]:
    """Those of the phrases that the running text has, as whole words."""
    text = " ".join(prose(markdown).split())
    return [phrase for phrase in RIDDLES if re.search(rf"(?<![\w-]){re.escape(phrase)}(?![\w-])", text)]


def introduction(markdown: str) -> list[str]:
    """The sentences of the first paragraph below the title."""
    body = markdown.split("\n", 1)[1].strip()
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(body.split("\n\n")[0].split()))


def defined(markdown: str) -> set[str]:
    """Terms that a page sets in italics where it explains them."""
    text = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"(?<![*\w])\*([a-z][a-z -]+)\*(?!\*)", text))
