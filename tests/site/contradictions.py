"""Sentences of pages that say something else than the table of features, ``docs/data/features.yaml``.

A row of the table may have ``words``: what pages call the feature. A sentence which denies a feature that works is a
contradiction, and so is one which promises a feature that is not there.
"""

from __future__ import annotations

import re
from typing import Any

from tests.site import features

DENIED_AFTER = (
    r"(?:is|are|was|were)(?: all| both)? (?:not|n't)(?: yet)?"
    r" (?:available|supported|implemented|offered|possible|there|part of)|"
    r"(?:isn't|aren't|cannot be used|can't be used|(?:is|are) unavailable|(?:is|are) unsupported|(?:is|are) planned|"
    r"(?:is|are) missing|(?:does|do) not (?:yet )?(?:exist|work)|will (?:come|follow|be added))"
)
"""What denies a subject that stands before it."""
DENIED_BEFORE = (
    r"(?:there (?:is|are) (?:no|not yet any)|no support for|without support for|"
    r"(?:Lockstep|it|we) (?:has|have) no|(?:Lockstep|it) lacks|"
    r"(?:Lockstep|it|we) (?:does|do|can)(?: not|n't)(?:not)?(?: yet)? (?:support|offer|have|do|provide|implement)|"
    r"(?:Lockstep|it) cannot (?:yet )?(?:do|use|train with)|not yet (?:supported|available|implemented):)"
)
"""What denies a subject that stands behind it."""
PROMISED = r"(?:works|runs|trains|was tested|is tested|has been tested|was tried|is supported)(?: \w+){0,2} (?:on|with)"
"""What promises the subject behind it."""
NEAR = r"(?:[^.;:!?]{0,40}?)"
"""What may stand between: a few words of the same clause."""


def sentences(markdown: str) -> list[str]:
    """The sentences of a page with the words that stand as code; no code blocks, tables and comments."""
    text = re.sub(r"^( *)```.*?^\1```$", "\n\n", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = "\n".join("" if line.startswith(("|", "#", ":::")) else line for line in text.splitlines())
    text = (
        re.sub(r"\]\([^)]*\)", "]", text).replace("`", "").replace("*", "").replace("[", "").replace("]", "")
    )
    parts = [
        " ".join(part.split()) for part in re.split(r"\n\s*\n|^ *(?:[-*]|\d+\.) ", text, flags=re.MULTILINE)
    ]
    return [one for part in parts for one in re.split(r"(?<=[.!?;])\s+", part) if one]


def rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for group in data["groups"] for row in group["rows"]]


def contradictions(markdown: str, data: dict[str, Any] | None = None) -> list[tuple[str, str]]:
    """(feature, sentence) of each sentence that the table contradicts."""
    found = []
    lines = sentences(markdown)
    for row in rows(features.load() if data is None else data):
        if "words" not in row:
            continue
        subject = rf"\b(?:{'|'.join(row['words'])})\b"
        if row["state"].startswith("works"):
            patterns = [
                # "tp, pp and ep are not available": a list of subjects, of which this is one
                rf"{subject}{NEAR}\b(?:{DENIED_AFTER})",
                rf"\b(?:{DENIED_BEFORE}) (?:\w+ ){{0,4}}?{subject}(?! (?:of|in|at|to|for|that|which|whose|size|group))",
            ]
        else:
            patterns = [rf"\b(?:{PROMISED}) (?:\w+ ){{0,3}}?{subject}"]
        found += [
            (row["feature"], line)
            for line in lines
            if any(re.search(pattern, line, re.IGNORECASE) for pattern in patterns)
        ]
    return found
