"""The page of what torch does on each version shows the record, and the installed torch does as it says."""

from __future__ import annotations

import json

import pytest

from tests import torch_changes

RECORD = json.loads(torch_changes.RECORD.read_text())


def test_the_page_shows_the_record() -> None:
    page = torch_changes.PAGE.read_text(encoding="utf-8")
    assert torch_changes.with_tables(page, RECORD) == page


def test_each_version_has_an_answer_to_each_question() -> None:
    names = [name for questions in torch_changes.PARTS.values() for name in questions]
    assert len(RECORD) > 2
    assert {version: [*seen] for version, seen in RECORD.items()} == dict.fromkeys(RECORD, names)


def test_each_question_has_another_answer_on_some_version_or_is_one_that_lockstep_answers_otherwise() -> None:
    questions = [(name, one) for part in torch_changes.PARTS.values() for name, one in part.items()]
    same = {name for name, _ in questions if len({seen[name] for seen in RECORD.values()}) == 1}
    controls = {"fsdp_sums_as_told", "muon_with_nesterov"}
    assert same - controls == {"dtensor_item", "dtensor_gradient_of_mean", "dtensor_uneven_mean"}


@pytest.mark.skipif(torch_changes.installed() not in RECORD, reason="this version of torch is not recorded")
def test_the_installed_torch_does_as_recorded() -> None:
    # In processes of its own: what Lockstep has prepared there changes what DTensors do.
    assert torch_changes.ask() == RECORD[torch_changes.installed()]
