"""A function's docstring begins with a verb. Ruff's D401 lets words pass that it does not take for verbs at all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
NO_VERB = re.compile(
    r"a|after|all|also|an|another|around|as|at|before|beside|by|bytes|each|every|for|from|how|if|in|inside|its|no|none|"
    r"numbers|of|on|one|only|other|parameters|ranks|seconds|several|such|that|the|these|this|those|to|what|where|whether|which|who|whose|with|without"
)


def without_verb(source: str) -> Iterator[str]:
    """Names of the functions, properties aside, whose docstring begins with a word that is no verb, or with none."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            is_property = any("property" in ast.unparse(one) for one in node.decorator_list)
            word = (text or "").split(maxsplit=1)[0].rstrip(",:.").lower() if text else "return"
            if not is_property and (NO_VERB.fullmatch(word) or not word.isalpha()):
                yield node.name


def test_functions_say_what_they_do() -> None:
    found = {str(path): list(without_verb(path.read_text("utf-8"))) for path in SOURCE.rglob("*.py")}
    assert len(found) > 400
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("Of a rank.", True),
        ("``x`` as a list.", True),
        ("Whether it is.", True),
        ("Return it.", False),
        ("Name ranks.", False),
    ],
)
def test_a_docstring_without_a_verb_is_found(text: str, is_found: bool) -> None:
    assert bool(list(without_verb(f'def f():\n    """{text}"""\n'))) == is_found
    assert not list(without_verb(f'@property\ndef f():\n    """{text}"""\n'))
