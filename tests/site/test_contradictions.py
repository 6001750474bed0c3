"""No page contradicts the table of features. The check notices planted sentences."""

from __future__ import annotations

import re

import pytest

from tests.site import features
from tests.site.contradictions import contradictions, rows
from tests.site.links import texts

TEXTS = {name: text for name, text in texts().items() if name != "CHANGELOG.md"}


@pytest.mark.parametrize("name", TEXTS)
def test_no_page_contradicts_the_table_of_features(name: str) -> None:
    assert contradictions(TEXTS[name]) == []


@pytest.mark.parametrize("name", TEXTS)
def test_who_speaks_of_gpus_says_that_nothing_has_run_on_one(name: str) -> None:
    """The table says so: pages that have numbers of GPUs must, too."""
    text = " ".join(TEXTS[name].split())
    if re.search(r"(tested|measured|faster|tried) on (a |\d+ |thousands of )?GPUs", text):
        assert "CPU" in text


@pytest.mark.parametrize("name", TEXTS)
def test_libraries_are_compared_in_the_one_table_only(name: str) -> None:
    text = re.sub(r"<!-- features -->.*?<!-- end of features -->", "", TEXTS[name], flags=re.DOTALL)
    heads = re.findall(r"^(\|.*)\n\|[ :|-]+$", text, re.MULTILINE)
    peers = ("Accelerate", "Fabric", "DeepSpeed", "torchtitan")
    assert [head for head in heads if sum(peer in head for peer in peers) > 2 and "Lockstep" in head] == []


def test_most_features_can_be_denied() -> None:
    assert sum("words" in row for row in rows(features.load())) > 15


@pytest.mark.parametrize(
    ("planted", "denied"),
    [
        ("In this version `tp`, `pp`, `cp` and `ep` are not available.", 4),
        ("`tp` and `pp` are not\nyet supported.", 2),
        ("There is no context parallel yet.", 1),
        ("Lockstep does not support expert parallel.", 1),
        ("- Pipeline parallelism is planned.", 1),
        ("[Offload](offload.md) to disk will come later.", 1),
        ("Slurm isn't supported.", 1),
        ("Lockstep cannot do tensor parallel.", 1),
        ("It runs on TPUs.", 1),
        ("`tp=2` works. A batch that is too small is not possible.", 0),
        ("There are no TPUs here.", 0),
        ("A stage of `pp` has no loader of its own.", 0),
    ],
)
def test_a_planted_sentence_is_noticed(planted: str, denied: int) -> None:
    found = contradictions(
        f"# Title\n\nThis page is fine.\n\n{planted}\n\n```text\ntp is not available\n```\n"
    )
    assert len(found) == denied, found


def test_a_feature_that_stops_working_contradicts_what_pages_promise() -> None:
    data = {"groups": [{"rows": [{"feature": "Ray", "state": "not yet", "words": ["ray"]}]}]}
    assert contradictions("# Title\n\nThe launcher works on Ray.\n", data)
    assert not contradictions("# Title\n\nThe launcher works on hosts.\n", data)
