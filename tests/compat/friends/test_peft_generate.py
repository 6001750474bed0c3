"""``generate`` of PEFT models whose base is sharded: the tokens of the whole model on one process, greedily."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lockstep import Accelerator

SMALL = {"vocab_size": 32, "pad_token_id": 0, "eos_token_id": 1}
DECODER = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
BART = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
# name -> (class of transformers, configuration, attention layers, feed forward layers, whether there is an encoder)
MODELS: dict[str, tuple[str, dict[str, Any], list[str], list[str], bool]] = {
    "gpt2": (
        "GPT2", {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1},
        ["c_attn"], ["mlp.c_proj"], False,
    ),
    "llama": (
        "Llama", {"hidden_size": 16, "intermediate_size": 24, **DECODER, "bos_token_id": 1},
        ["q_proj", "v_proj"], ["down_proj"], False,
    ),
    "t5": (
        "T5", {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
        ["q", "v"], ["wo"], True,
    ),
    "bart": (
        "Bart", {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, **BART, "decoder_start_token_id": 2},
        ["q_proj", "v_proj"], ["fc2"], True,
    ),
}  # fmt: skip
CELLS = [
    ("gpt2", "lora"), ("gpt2", "prefix"), ("llama", "ia3"), ("t5", "prompt"), ("t5", "lora"), ("bart", "prefix"),
    ("bart", "ia3"),
]  # fmt: skip
NEW_TOKENS = 8


def build(model: str, adapter: str) -> Any:
    """The same weights each time, large enough for the tokens to vary, adapters included."""
    import peft
    import transformers

    name, options, attention, feed_forward, has_encoder = MODELS[model]
    kind = "ForConditionalGeneration" if has_encoder else "ForCausalLM" if name != "GPT2" else "LMHeadModel"
    config = getattr(transformers, f"{name}Config")(**SMALL, **options)
    task = {"task_type": "SEQ_2_SEQ_LM" if has_encoder else "CAUSAL_LM"}
    adapters = {
        "lora": lambda: peft.LoraConfig(r=4, target_modules=attention, **task),
        "ia3": lambda: peft.IA3Config(
            target_modules=[*attention, *feed_forward], feedforward_modules=feed_forward, **task
        ),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **task),
        "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **task),
    }
    torch.manual_seed(0)
    found = peft.get_peft_model(getattr(transformers, f"{name}{kind}")(config), adapters[adapter]())
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in found.parameters():
            spread = 0.5 if parameter.dim() > 1 else 0.1
            parameter.add_(spread * torch.randn(parameter.shape, generator=source))
    return found.eval()


def tokens(model: Any) -> list[list[int]]:
    ids = torch.randint(3, 32, (3, 5), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
    return found.tolist()  # type: ignore[no-any-return]


def stepped(model: Any, backward: Callable[[torch.Tensor], object], optimizer: Any) -> None:
    ids = torch.randint(3, 32, (4, 6), generator=torch.Generator().manual_seed(3))
    backward(model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


def generated(cells: list[tuple[str, str]]) -> dict[str, Any]:
    """Of each cell: tokens of the whole model and of the sharded one, before and after a step on the same batch."""
    accelerator = Accelerator(cpu=True, parallel="zero=3", watch=False)
    found = {}
    for cell in cells:
        whole = build(*cell)
        model = copy.deepcopy(whole)
        mine = optimizer_of(whole)
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        before = tokens(whole), tokens(model)
        stepped(whole, torch.Tensor.backward, mine)
        stepped(model, accelerator.backward, optimizer)
        found["/".join(cell)] = (before, (tokens(whole), tokens(model)))
        accelerator.free_memory()
    return found


@pytest.mark.timeout(600)
def test_sharded_peft_models_generate_the_tokens_of_whole_ones(
    run_distributed: Callable[..., list[Any]],
) -> None:
    for package in ("peft", "transformers"):
        pytest.importorskip(package)
    ranks = run_distributed(generated, 2, CELLS, timeout_s=500)
    assert ranks[0] == ranks[1]
    assert {
        name: pairs for name, pairs in ranks[0].items() if any(one != other for one, other in pairs)
    } == {}
    answers = [str(pairs[0][0]) for pairs in ranks[0].values()]
    assert len(set(answers)) == len(CELLS)  # else all would be the same word, adapters or not
