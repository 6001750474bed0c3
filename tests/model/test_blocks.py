"""Which modules are a model's blocks: in models as people write them, named, or chosen by a rule."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lockstep.errors import UsageError
from lockstep.model import find_blocks, shared_parameters


def load_example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "gpt" / "model.py"
    spec = importlib.util.spec_from_file_location("example_gpt_model", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpt = load_example()


class Mlp(nn.Sequential):
    def __init__(self, width: int = 4) -> None:
        super().__init__(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class WideBlock(Block):
    pass


class ExpertBlock(nn.Module):
    """A mixture of experts, whose list lies inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Holder(nn.Module):
    """A model with the given submodules."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def basic(width: int = 4) -> nn.Module:
    return Holder(conv=nn.Conv2d(width, width, 3), norm=nn.BatchNorm2d(width))


def stack(count: int) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


def small(**more: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 20,
    }
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return {**sizes, **ids, **more}


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{index}" for index in range(count)]


# -- found -----------------------------------------------------------------------------------------------

PLAIN_MODELS = {
    "the demo's GPT": (lambda: gpt.GPT(gpt.GPTConfig(layers=3)), names("blocks", 3)),
    "the demo's GPT with one layer": (lambda: gpt.GPT(gpt.GPTConfig(layers=1)), names("blocks", 1)),
    "torch's encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 3),
        names("layers", 3),
    ),
    "torch's encoder and decoder": (
        lambda: nn.Transformer(8, 2, 2, 3),
        names("encoder.layers", 2) + names("decoder.layers", 3),
    ),
    "stages of a ResNet": (
        lambda: Holder(
            stem=nn.Conv2d(3, 4, 3),
            layer1=nn.Sequential(basic(), basic()),
            layer2=nn.Sequential(basic()),
            head=nn.Linear(4, 2),
        ),
        ["layer1.0", "layer1.1", "layer2.0"],
    ),
    "stages in a list": (
        lambda: Holder(
            stages=nn.Sequential(nn.Sequential(basic()), nn.Sequential(basic(), basic())),
            head=nn.Linear(4, 2),
        ),
        ["stages.0.0", "stages.1.0", "stages.1.1"],
    ),
    "a vision transformer": (
        lambda: Holder(
            patches=nn.Conv2d(3, 4, 2), blocks=nn.Sequential(Block(), Block()), head=nn.Linear(4, 2)
        ),
        names("blocks", 2),
    ),
    "mixture of experts": (
        lambda: Holder(layers=nn.ModuleList([ExpertBlock(), ExpertBlock()])),
        names("layers", 2),
    ),
    "mixture of experts with one layer": (
        lambda: Holder(layers=nn.ModuleList([ExpertBlock()])),
        names("layers", 1),
    ),
    "a namespace that holds the list": (
        lambda: Holder(
            transformer=nn.ModuleDict(
                {
                    "token": nn.Embedding(4, 4),
                    "place": nn.Embedding(4, 4),
                    "h": stack(2),
                    "norm": nn.LayerNorm(4),
                }
            )
        ),
        names("transformer.h", 2),
    ),
    "two towers in a dict": (
        lambda: Holder(towers=nn.ModuleDict({"text": stack(2), "image": stack(1)})),
        names("towers.text", 2) + names("towers.image", 1),
    ),
    "a stem and a body in a Sequential": (
        lambda: nn.Sequential(nn.Embedding(4, 4), Holder(layers=stack(2)), nn.Linear(4, 4)),
        names("1.layers", 2),
    ),
    "blocks beside other layers": (
        lambda: nn.Sequential(nn.Embedding(4, 4), Block(), Block(), nn.LayerNorm(4), nn.Linear(4, 4)),
        ["1", "2"],
    ),
    "a list of small Sequentials": (
        lambda: Holder(layers=nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])),
        names("layers", 2),
    ),
    "reparametrised layers": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)),
        ["0", "1"],
    ),
    "an MLP": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["0", "2"]),
    "an MLP in a module": (lambda: Holder(net=Mlp(), scale=nn.Linear(4, 4)), ["net.0", "net.2"]),
    "embeddings with positions, and layers": (
        lambda: Holder(
            source=nn.Sequential(Holder(table=nn.Embedding(4, 4)), nn.Dropout()),
            target=nn.Sequential(Holder(table=nn.Embedding(4, 4)), nn.Dropout()),
            layers=stack(2),
        ),
        ["layers.0", "layers.1"],
    ),
    "a module that appears four times": (lambda: Holder(layers=nn.ModuleList([Block()] * 4)), ["layers.0"]),
    "a single layer": (lambda: nn.Linear(4, 4), []),
    "layers as attributes": (lambda: Holder(first=nn.Linear(4, 4), second=nn.Linear(4, 4)), []),
    "no parameters": (lambda: nn.Sequential(nn.ReLU(), nn.ReLU()), []),
}


@pytest.mark.parametrize("kind", PLAIN_MODELS)
def test_blocks_of_a_plain_model_are_found_in_order(kind: str) -> None:
    build, expected = PLAIN_MODELS[kind]
    model = build()
    found = find_blocks(model)
    assert list(found) == expected
    assert all(model.get_submodule(name) is module for name, module in found.items())


TRANSFORMERS = {
    "Llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, small(), names("model.layers", 2)),
    "BERT": (
        transformers.BertForMaskedLM,
        transformers.BertConfig,
        small(),
        names("bert.encoder.layer", 2),
    ),
    "Mixtral": (
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig,
        small(num_key_value_heads=1, num_local_experts=2),
        names("model.layers", 2),
    ),
    "GPT-2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config,
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2},
        names("transformer.h", 2),
    ),
    "T5": (
        transformers.T5ForConditionalGeneration,
        transformers.T5Config,
        {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 20},
        names("encoder.block", 2) + names("decoder.block", 2),
    ),
    "ALBERT": (
        transformers.AlbertForMaskedLM,
        transformers.AlbertConfig,
        small(embedding_size=8),
        ["albert.encoder.albert_layer_groups.0"],
    ),
    "ViT": (
        transformers.ViTForImageClassification,
        transformers.ViTConfig,
        {**small(), "image_size": 8, "patch_size": 4},
        names("vit.layers", 2),
    ),
}


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_blocks_of_a_transformers_model_are_its_layers_and_not_its_embeddings(kind: str) -> None:
    model_class, config_class, options, expected = TRANSFORMERS[kind]
    model = model_class(config_class(**options))
    if kind == "ViT":  # its list of layers moved between versions
        expected = [name for name, module in model.named_modules() if type(module).__name__ == "ViTLayer"]
    assert list(find_blocks(model)) == expected
    assert list(find_blocks(Holder(inner=model))) == [f"inner.{name}" for name in expected]


def test_no_split_modules_of_a_model_win_over_the_outermost_list() -> None:
    stages = nn.ModuleList(Holder(layers=stack(2)) for _ in range(2))
    model = Holder(stages=stages)
    assert list(find_blocks(model)) == names("stages", 2)
    model._no_split_modules = ["Block"]
    assert list(find_blocks(model)) == names("stages.0.layers", 2) + names("stages.1.layers", 2)


# -- named -----------------------------------------------------------------------------------------------


def named_model() -> nn.Module:
    return Holder(
        token=nn.Embedding(4, 4),
        encoder=Holder(layers=stack(2)),
        decoder=Holder(layers=nn.ModuleList([Block(), WideBlock()])),
        head=Mlp(),
    )


ENCODER, DECODER = names("encoder.layers", 2), names("decoder.layers", 2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("Block",), ENCODER + DECODER),
        (("WideBlock",), ["decoder.layers.1"]),
        (("encoder.layers.0",), ["encoder.layers.0"]),
        (("encoder.layers.*",), ENCODER),
        (("*.layers.*",), ENCODER + DECODER),
        (("*.layers.[1-9]",), ["encoder.layers.1", "decoder.layers.1"]),
        (("decoder.*.*", "token"), ["token", *DECODER]),
        (("Block", "Linear"), [*ENCODER, *DECODER, "head.0", "head.2"]),  # nested Linears: outermost wins
        (("LayerNorm", "encoder"), ["encoder", "decoder.layers.0.norm", "decoder.layers.1.norm"]),
        (lambda name, module: isinstance(module, Block) and name.startswith("enc"), ENCODER),
        (
            lambda name, module: name.endswith(("s.1", "d.1")),
            ["encoder.layers.1", "decoder.layers.1", "head.1"],
        ),
    ],
)
def test_named_blocks_are_taken_and_the_outermost_of_nested_ones(given: Any, expected: list[str]) -> None:
    assert list(find_blocks(named_model(), given)) == expected


def test_a_pattern_matches_direct_children_only() -> None:
    model = Holder(layers=stack(2))
    assert list(find_blocks(model, ("layers.*",))) == names("layers", 2)
    assert list(find_blocks(model, ("layers.*.mlp",))) == ["layers.0.mlp", "layers.1.mlp"]


def test_a_part_that_is_defined_before_the_block_around_it_is_not_a_block_of_its_own() -> None:
    block = Block()
    model = Holder(early=block.mlp, layers=nn.ModuleList([block, Block()]))
    chosen = find_blocks(model, ("Block", "Mlp"))
    assert list(chosen) == names("layers", 2)


def test_a_block_with_several_names_is_found_under_any_and_called_by_its_first() -> None:
    blocks = stack(2)
    model = Holder(first=blocks[0], layers=blocks, again=nn.ModuleList([blocks[1]] * 2))
    assert list(find_blocks(model)) == ["first", "layers.1"]
    assert list(find_blocks(model, ("again.1", "layers.0"))) == ["first", "layers.1"]


def test_a_rule_is_not_asked_about_the_model_itself() -> None:
    asked: list[str] = []
    find_blocks(Holder(layers=stack(1)), lambda name, module: asked.append(name) or name == "layers.0")
    assert "" not in asked


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("Blok",), ["'Blok'", "Holder", "Did you mean 'Block'?", "WideBlock"]),
        (("encoder.layer.*",), ["'encoder.layer.*'", "Did you mean 'encoder.layers.*'?"]),
        (("Block", "nothing.at.all"), ["'nothing.at.all'"]),
        (("Holder.nothing",), ["'Holder.nothing'"]),
        (("encoder.layers",), ["'encoder.layers'", "ModuleList", "'encoder.layers.*'"]),
        (("ModuleList",), ["ModuleList", "'encoder.layers.*'"]),
        (lambda name, module: False, ["<lambda>", "none of", "submodules"]),
    ],
)
def test_what_matches_nothing_or_is_not_called_is_refused_with_candidates(
    given: Any, words: list[str]
) -> None:
    with pytest.raises(UsageError) as error:
        find_blocks(named_model(), given)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_model_itself_is_never_a_block() -> None:
    with pytest.raises(UsageError):
        find_blocks(Block(), ("Block",))


# -- shared parameters -----------------------------------------------------------------------------------


def test_parameters_of_several_blocks_or_of_a_block_and_the_rest_are_reported_by_their_first_name() -> None:
    model = Holder(token=nn.Embedding(4, 4), layers=stack(3), head=nn.Linear(4, 4, bias=False))
    assert shared_parameters(model, find_blocks(model)) == {}
    model.head.weight = model.token.weight  # tied outside of the blocks
    assert shared_parameters(model, find_blocks(model)) == {}
    model.layers[2].mlp[0].weight = model.layers[0].mlp[0].weight
    model.layers[1].norm.weight = model.head.bias = nn.Parameter(torch.ones(4))
    assert shared_parameters(model, find_blocks(model)) == {
        "layers.0.mlp.0.weight": ["layers.0", "layers.2"],
        "layers.1.norm.weight": ["layers.1"],
    }


def test_a_submodule_in_two_blocks_and_one_used_outside_are_shared() -> None:
    model = Holder(layers=stack(2), last=nn.LayerNorm(4))
    model.layers[1].mlp = model.layers[0].mlp
    model.last = model.layers[1].norm
    both = {f"layers.0.mlp.{name}": ["layers.0", "layers.1"] for name, _ in Mlp().named_parameters()}
    outside = {f"layers.1.norm.{name}": ["layers.1"] for name in ("weight", "bias")}
    assert shared_parameters(model, find_blocks(model)) == {**both, **outside}


def test_a_block_that_appears_several_times_shares_nothing() -> None:
    model = Holder(layers=nn.ModuleList([Block()] * 3))
    assert shared_parameters(model, find_blocks(model)) == {}
