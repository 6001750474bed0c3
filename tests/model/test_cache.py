"""Caches of keys and values are turned off wherever a configuration asks for one."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep.model import disable_cache


def test_caches_are_turned_off_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    sizes: Any = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
    assert model.config.use_cache is True
    with caplog.at_level(logging.INFO, "lockstep"):
        disable_cache(nn.ModuleDict({"inner": model, "plain": nn.Linear(2, 2)}), "they would be wrong")
        disable_cache(model, "they would be wrong")
    assert model.config.use_cache is False
    assert [r.message for r in caplog.records] == [
        "use_cache of LlamaForCausalLM is turned off: they would be wrong."
    ]
