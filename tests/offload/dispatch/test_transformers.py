"""Models of transformers, saved and loaded in parts: the same logits, the same texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model, LlamaConfig, LlamaForCausalLM

from lockstep import init_empty_weights, load_checkpoint_and_dispatch
from lockstep.hooks import remove_hook_from_submodules
from lockstep.offload.weights import streamer_of

MODELS = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(
            n_embd=32, n_layer=4, n_head=4, vocab_size=64, n_positions=64, bos_token_id=1, eos_token_id=2
        ),
    ),
}


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[nn.Module, Any, Path]:
    kind, config = MODELS[request.param]
    torch.manual_seed(0)
    model = kind(config).eval()
    model.save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 3

    def make() -> nn.Module:
        with init_empty_weights():
            return kind(config)

    return model, make, tmp_path / "saved"


def test_a_streamed_model_computes_generates_and_is_saved_as_the_plain_one(
    saved: tuple[Any, Any, Path], tmp_path: Path
) -> None:
    plain, make, folder = saved
    model = make()
    assert all(parameter.is_meta for parameter in model.parameters())
    total = sum(parameter.nbytes for parameter in plain.parameters())
    model = load_checkpoint_and_dispatch(
        model,
        folder,
        device_map="auto",
        max_memory={"cpu": total * 2 // 3},
        no_split_module_classes=model._no_split_modules,
    ).eval()
    assert {"cpu", "disk"} == set(model.hf_device_map.values())
    tokens = torch.randint(3, 64, (3, 7))
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    with torch.no_grad():
        for _ in range(2):
            expected = plain(input_ids=tokens, attention_mask=mask)
            assert torch.equal(model(input_ids=tokens, attention_mask=mask).logits, expected.logits)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(
        model.generate(tokens, attention_mask=mask, **options),
        plain.generate(tokens, attention_mask=mask, **options),
    )
    streamer = streamer_of(model)
    assert streamer is not None and streamer.counters.peak_bytes <= streamer.budget < total
    model.save_pretrained(tmp_path / "again")
    again = type(plain).from_pretrained(tmp_path / "again")
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
        assert torch.equal(model.state_dict()[name], value)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (
        plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    )
    remove_hook_from_submodules(model)
    assert torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)


def test_another_dtype_is_that_of_from_pretrained(saved: tuple[Any, Any, Path], tmp_path: Path) -> None:
    plain, make, folder = saved
    expected = type(plain).from_pretrained(folder, dtype=torch.bfloat16)
    model = load_checkpoint_and_dispatch(
        make(), folder, {"": "disk"}, offload_folder=tmp_path / "offload", dtype="bfloat16"
    ).eval()
    tokens = torch.randint(3, 64, (2, 5))
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, expected(input_ids=tokens).logits)


def test_a_model_without_its_head_is_loaded_from_one_with_it(tmp_path: Path) -> None:
    kind, config = MODELS["gpt2"]
    whole = kind(config).eval()
    whole.save_pretrained(tmp_path)
    with init_empty_weights():
        base = GPT2Model(config)
    base = load_checkpoint_and_dispatch(base, tmp_path, {"": "disk"}).eval()
    tokens = torch.randint(3, 64, (2, 5))
    with torch.no_grad():
        assert torch.equal(
            base(input_ids=tokens).last_hidden_state, whole.transformer(input_ids=tokens).last_hidden_state
        )
