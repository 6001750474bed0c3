"""The words of offload: what they mean, how they read back, and with what they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import Offload
from lockstep.errors import ConfigError
from lockstep.utils import Parallel
from tests.refusals import expect_refusal


def refusal(text: str, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Parallel.parse(text).merged(**more)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "offload", "optimizer", "params"),
    [
        ("auto", Offload.NONE, False, False),
        ("offload=none", Offload.NONE, False, False),
        ("offload=false zero=1", Offload.NONE, False, False),
        ("offload=optimizer", Offload.OPTIMIZER, True, False),
        ("offload=params", Offload.PARAMS, True, True),
        ("offload", Offload.ALL, True, True),
        ("offload=true zero=3", Offload.ALL, True, True),
        ("offload=all ddp", Offload.ALL, True, True),
    ],
)
def test_what_each_word_takes_off_the_device(
    text: str, offload: Offload, optimizer: bool, params: bool
) -> None:
    plan = Parallel.parse(text)
    assert plan.offload is offload
    assert (plan.offloads_optimizer, plan.offloads_params) == (optimizer, params)


def test_truth_values_in_code_are_all_and_nothing() -> None:
    assert Parallel(offload=True).offload is Offload.ALL  # type: ignore[arg-type]
    assert Parallel(offload=False) == Parallel()  # type: ignore[arg-type]
    assert Parallel.parse("zero=2").merged(offload=True, offload_to=Path("/a")).offload_to == "/a"


def test_a_folder_is_where_the_words_say() -> None:
    assert Parallel.parse("offload").offload_folder is None
    assert Parallel.parse("offload offload_to=CPU") == Parallel.parse("offload")
    home = Parallel.parse("offload=optimizer offload_to=~/x")
    assert (home.offload_folder, home.params_folder) == (Path.home() / "x", None)
    assert Parallel.parse("offload=params offload_to=./disk").params_folder == Path("disk")


@given(
    st.sampled_from(["", "zero=1", "zero=3", "ddp"]),
    st.sampled_from(list(Offload)),
    st.one_of(st.just("cpu"), st.text(min_size=1)),
)
def test_a_line_reads_back_as_what_it_was_made_from(words: str, offload: Offload, place: str) -> None:
    try:
        plan = Parallel.parse(words or None).merged(offload=offload, offload_to=place)
    except ConfigError:
        return
    assert Parallel.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("text", "more", "sentence"),
    [
        ("offload=disk", {}, "Use one of none, optimizer, params, all."),
        ("offload=optimiser", {}, "Did you mean 'optimizer'?"),
        ("offload offload_to=nvme", {}, "neither cpu nor a folder"),
        ("offload offload_to=", {}, "offload_to has no value"),
        ("offload offload_to", {}, "offload_to has no value"),
        ("offload", {"offload_to": "/a b"}, "has spaces or control characters"),
        ("offload", {"offload_to": "/a\0"}, "has spaces or control characters"),
        ("offload", {"offload_to": 3}, "neither cpu nor a folder"),
        ("offload_to=/a", {}, "offload_to says how to offload, but nothing is offloaded"),
        ("offload=optimizer tp=2", {}, "Drop tp, or use a stage of ZeRO with offload=all"),
        ("offload=optimizer zero=1 cp=2", {}, "Drop cp"),
        ("offload zero=3 offload_to=/a pp=2", {}, "offload_to=/a goes with ddp and ZeRO only. Drop pp"),
        ("offload ep=2", {}, "Drop ep."),
        ("offload_budget=1GB", {}, "offload_budget says how to offload, but nothing is offloaded"),
        ("offload=optimizer offload_budget=1GB", {}, "Use offload=params or all"),
        ("offload offload_budget=much", {}, "is not a size"),
        ("offload tp=2", {}, "with tp, offload needs a stage of ZeRO"),
        ("dataparallel offload=optimizer", {}, "offloads nothing"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(text: str, more: dict[str, Any], sentence: str) -> None:
    message = refusal(text, **more)
    assert sentence in message and "\n" not in message


def test_several_processes_offload_parameters_only_in_shards() -> None:
    for text in ("offload", "offload=params", "ddp offload offload_to=/a"):
        Parallel.parse(text).check_offload(1)
        expect_refusal(ConfigError, "zero=1", Parallel.parse(text).check_offload, 2)
    for text in ("auto", "offload=optimizer", "zero=1 offload", "zero=3 offload=params tp=2"):
        Parallel.parse(text).check_offload(8)
