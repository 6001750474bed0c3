"""What becomes of each odd model and loop under each strategy: plain torch's numbers, or a refusal in a sentence.

The tests of such cases compare with plain torch and pass what came to ``hold``, which compares it with the row of
``verdicts.json``. A row "same: stated by its test" or "refused: stated by its test: words" has the verdict that the
test expects: it was not recorded yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from tests.frozen.files import ROOT, is_recording, read

WORDS = {"equal": "same", "refused": "refused"}
"""A test's word -> the verdict. Any other word is wrong: other numbers, a crash, a refusal after a step."""
OF_ANOTHER_RANK = "This rank stops with it."
TESTS = (
    "tests/parallel/expert/test_fragments.py",
    "tests/parallel/optimizers",
    "tests/parallel/zero/test_models.py",
    "tests/parallel/test_split_loops.py",
    "tests/parallel/tensor/test_fragments.py",
    "tests/parallel/tensor/test_architectures.py",
    "tests/parallel/context/test_fragments.py",
    "tests/parallel/context/test_architectures.py",
    "tests/parallel/pipeline/test_fragments.py",
    "tests/parallel/pipeline/test_layers_of_torch.py",
    "tests/parallel/test_loops.py",
    "tests/parallel/split",
)

Found = tuple[str, str]
"""A test's word of one case on one rank, and what was said there."""


def hold(group: str, ranks: Iterable[Mapping[str, Found]]) -> None:
    """Fail unless every case that ran has the verdict of its row; ``group``: the table and the strategy."""
    ranks = list(ranks)
    now = {f"{group}: {case}": verdict([found[case] for found in ranks]) for case in ranks[0]}
    if is_recording(now):
        return
    frozen = read("verdicts")
    moved = {
        row: f"{frozen.get(row, 'no row')}; now {text}"
        for row, text in now.items()
        if word(frozen.get(row, "")) != word(text)
    }
    assert not moved, f"python -m tests.frozen verdicts writes the rows of {moved}"


def verdict(found: Sequence[Found]) -> str:
    """Join the ranks' words: "same", "refused: sentence", or "wrong: what came"."""
    words = {WORDS.get(one, "wrong") for one, _ in found}
    if words == {"same"}:
        return "same"
    said = [text for _, text in found if text and OF_ANOTHER_RANK not in text]
    return f"{'refused' if words == {'refused'} else 'wrong'}: {first_sentence(said[0] if said else found[0][1])}"


def word(row: str) -> str:
    """Return the verdict alone, or "" if there is no row."""
    return row.partition(":")[0]


def first_sentence(text: str) -> str:
    """Return it without what differs between machines, and without the numbers of lines."""
    line = (text.strip().splitlines() or [""])[0]
    sentence = re.split(r"(?<=[^.])\. (?=[A-Z])", line)[0]
    sentence = re.sub(r"(?:/[^\s/']+)*/site-packages/", "", sentence.replace(f"{ROOT}/", ""))
    return re.sub(r"\bline \d+", "line N", sentence)[:300]
