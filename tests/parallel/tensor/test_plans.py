"""Plans: a user's patterns, those that transformers models bring, and those found by looking at a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.tensor import TensorOptions, make_plan
from parallel.tensor import problem
from tests.refusals import expect_refusal

WIDTH = 16


class Separate(nn.Module):
    """Attention and MLP in one module, as in torch's own encoder layer but with projections of its own."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.embed_dim = heads, WIDTH
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.linear1, self.linear2 = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (self.heads(layer(h)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out_proj(y.transpose(1, 2).reshape(*x.shape[:2], self.embed_dim))
        return x + self.linear2(F.relu(self.linear1(self.norm2(x))))

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.embed_dim // self.num_heads).transpose(1, 2)


class Interleaved(nn.Module):
    """Rows are query, key and value of one head after the other, as in GPT-NeoX; heads are normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm = nn.LayerNorm(WIDTH // 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query_key_value(x).unflatten(-1, (self.num_heads, -1)).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(
            self.q_norm(q).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        )
        return self.dense(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 80 if packed else 40)
        self.gate = None if packed else nn.Linear(WIDTH, 40)
        self.down = nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, dim=-1) if self.gate is None else (self.gate(x), self.up(x))
        return self.down(F.silu(a) * b)


class Mixed(nn.Module):
    """What must stay whole: a norm between layers, a softmax over features, parameters of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.Sequential(nn.Linear(WIDTH, 40), nn.LayerNorm(40), nn.Linear(40, WIDTH))
        self.soft = nn.Sequential(nn.Linear(WIDTH, 40), nn.Softmax(-1), nn.Linear(40, WIDTH))
        self.torch_attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.classifier = nn.Linear(WIDTH, 3)
        self.good = nn.Sequential(nn.Linear(WIDTH, 40), nn.Dropout(0.5), nn.Tanh(), nn.Linear(40, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.good(self.classifier(self.soft(self.normed(x))))


def infer(model: nn.Module, ranks: int = 2) -> Any:
    return make_plan(model, ranks, TensorOptions(plan="infer"))


def test_the_gpt_of_the_examples_is_understood_whole() -> None:
    plan = infer(problem.GPT())
    assert plan.styles == {
        **{f"blocks.{i}.attention.qkv": "qkv_colwise" for i in range(2)},
        **{f"blocks.{i}.attention.out": "rowwise" for i in range(2)},
        **{f"blocks.{i}.mlp.0": "colwise" for i in range(2)},
        **{f"blocks.{i}.mlp.2": "rowwise" for i in range(2)},
        "token": "embedding_rowwise",
    }
    assert [(a.name, a.heads, dict(a.attributes)) for a in plan.attention] == [
        (f"blocks.{i}.attention", 4, {"heads": 2}) for i in range(2)
    ]
    assert str(plan).splitlines()[:3] == [
        "tensor-parallel plan (inferred)",
        "module                  style              times  why",
        "blocks.*.attention.qkv  qkv_colwise            2  attention: 4 heads",
    ]
    assert "position" in plan.left


def test_attention_and_mlp_in_one_module_are_two_regions() -> None:
    plan = infer(nn.Sequential(Separate(), Separate()), ranks=4)
    names = ("q_proj", "k_proj", "v_proj", "linear1")
    assert plan.styles == {
        **{f"{i}.{name}": "colwise" for i in range(2) for name in names},
        **{f"{i}.{name}": "rowwise" for i in range(2) for name in ("out_proj", "linear2")},
    }
    assert dict(plan.attention[0].attributes) == {"num_heads": 1, "embed_dim": 4}


def test_fused_rows_of_head_after_head_are_known_by_their_name() -> None:
    plan = infer(nn.ModuleDict({"attention": Interleaved()}))
    assert plan.styles == {"attention.query_key_value": "colwise", "attention.dense": "rowwise"}


def test_gates_are_found_apart_and_packed() -> None:
    plan = infer(nn.ModuleDict({"a": Gated(False), "b": Gated(True)}))
    assert plan.styles == {
        "a.up": "colwise",
        "a.gate": "colwise",
        "a.down": "rowwise",
        "b.up": "packed_colwise",
        "b.down": "rowwise",
    }


def test_what_is_not_understood_stays_whole_and_says_why() -> None:
    plan = infer(Mixed())
    assert plan.styles == {"good.0": "colwise", "good.3": "rowwise"}
    assert set(plan.left) == {
        *("normed.0", "normed.2", "soft.0", "soft.2", "classifier"),
        *("torch_attention", "torch_attention.out_proj"),
    }
    assert plan.left["soft.0"] == "'1' has something for all features between the layers"


def test_projections_and_output_layer_may_be_in_modules_beside_each_other() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=31, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32
    )
    plan = infer(BertModel(config, add_pooling_layer=False))
    attention = "encoder.layer.0.attention"
    # The norm behind the output layer works on whole features: its gradients are no partial sums.
    assert plan.styles == {
        **{f"{attention}.self.{name}": "colwise" for name in ("query", "key", "value")},
        f"{attention}.output.dense": "rowwise",
        "embeddings.word_embeddings": "embedding_rowwise",
    }


@pytest.mark.parametrize("tied", [False, True])
def test_the_plan_for_llama_is_the_one_that_it_brings(tied: bool) -> None:
    model = problem.make_model("tied-llama" if tied else "llama")
    brought = make_plan(model, 2, TensorOptions(plan="transformers"))
    embedding = {} if problem.plan_splits_embedding(model) else {"model.embed_tokens": "embedding_rowwise"}
    assert infer(model).styles == brought.styles | embedding
    assert make_plan(model, 2).styles == brought.styles
    assert brought.styles["lm_head"] == "colwise_gather_output"
    assert [(a.heads, a.kv_heads, dict(a.attributes)) for a in brought.attention] == [(8, 4, {})] * 2


def test_gpt2_with_its_transposed_layers_is_understood() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0)
    plan = infer(GPT2LMHeadModel(config))
    assert plan.styles == {
        "transformer.h.0.attn.c_attn": "qkv_colwise",
        "transformer.h.0.attn.c_proj": "rowwise",
        "transformer.h.0.mlp.c_fc": "colwise",
        "transformer.h.0.mlp.c_proj": "rowwise",
        "transformer.wte": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
    }


def test_a_model_on_the_meta_device_is_looked_at_too() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Separate(), Separate())
    assert infer(model).styles == infer(nn.Sequential(Separate(), Separate())).styles


def test_a_users_patterns_match_part_by_part_and_the_last_counts() -> None:
    given = {
        "blocks.*.mlp.0": "colwise",
        "blocks.*.mlp.2": "rowwise",
        "blocks.*.attention.qkv": "qkv_colwise",
        "blocks.*.attention.out": "rowwise",
        "blocks.1.attention_norm": "replicate",
    }
    plan = make_plan(problem.GPT(), 2, TensorOptions(plan=given))
    assert plan.styles["blocks.0.attention.qkv"] == "qkv_colwise"
    assert plan.styles["blocks.1.attention_norm"] == "replicate"
    assert len(plan.styles) == 9


def test_a_stage_gets_its_part_of_the_plan_of_the_whole() -> None:
    model = problem.make_model("llama")
    options = TensorOptions(sequence_parallel=True, loss_parallel=True)
    plan = make_plan(model, 2, options)
    del model.model.layers[1], model.lm_head  # type: ignore[union-attr]
    part = plan.within(model)
    assert set(part.styles) == {
        name for name in plan.styles if not name.startswith(("model.layers.1", "lm_head"))
    }
    assert [region.name for region in part.attention] == ["model.layers.0.self_attn"]
    again = make_plan(model, 2, TensorOptions(part, sequence_parallel=True, loss_parallel=True))
    assert again == part


def test_features_that_do_not_divide_stay_whole() -> None:
    plan = make_plan(problem.GPT(hidden=30), 4, TensorOptions())
    assert (
        plan.left["blocks.0.mlp.0"] == plan.left["blocks.0.mlp.2"] == "30 features do not divide by 4 ranks"
    )
    assert any("attention" in name for name in plan.styles)


@pytest.mark.parametrize(
    ("make_model", "options", "ranks", "message"),
    [
        (problem.GPT, {"plan": {"block.*.mlp.0": "colwise"}}, 2, "Did you mean 'blocks"),
        (problem.GPT, {"plan": {"blocks.*.mlp.0": "colwize"}}, 2, "Did you mean 'colwise'"),
        (problem.GPT, {"plan": {"blocks.*.norm.weight": "colwise"}}, 2, "matches no module"),
        (problem.GPT, {"plan": {"token.weight": "colwise"}}, 2, "names a parameter"),
        (problem.GPT, {"plan": {"norm": "colwise"}}, 2, "'norm' is a LayerNorm, but 'colwise'"),
        (problem.GPT, {"plan": {}}, 2, "tp_plan is empty"),
        (problem.GPT, {"plan": "inferr"}, 2, "Did you mean 'infer'"),
        (problem.GPT, {"plan": "transformers"}, 2, "no tensor-parallel plan of its own"),
        (problem.GPT, {}, 8, "Use tp=1 or 2 or 4"),
        (lambda: problem.GPT(vocabulary=5), {}, 4, "The 5 rows of 'token'"),
        (
            lambda: problem.make_model("llama"),
            {},
            8,
            "4 key-value heads of 'model.layers.0.self_attn'",
        ),
        (
            lambda: problem.make_model("llama"),
            {"plan": {"model.layers.*.self_attn.q_proj": "colwise"}},
            2,
            "but not 'model.layers.0.self_attn.k_proj'",
        ),
        (Mixed, {"plan": {"torch_attention": "colwise"}}, 2, "'torch_attention' is an nn.MultiheadAttention"),
        (Mixed, {"plan": {"classifier": "colwise"}}, 2, "The 3 output features of 'classifier'"),
        (Mixed, {"loss_parallel": True}, 2, "loss_parallel needs an output layer"),
        (Mixed, {"sequence_parallel": True}, 2, "sequence_parallel"),
        (lambda: nn.Linear(4, 4), {}, 2, "Nothing in Linear"),
    ],
)
def test_plans_that_cannot_work_are_refused_before_anything_changes(
    make_model: Any, options: dict[str, Any], ranks: int, message: str
) -> None:
    model = make_model()
    before = dict(model.named_parameters())
    expect_refusal(UsageError, message, make_plan, model, ranks, TensorOptions(**options))
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_modules_with_an_unknown_style_in_the_plan_of_a_model_stay_whole() -> None:
    model: Any = problem.make_model("llama")
    model.tp_plan = None
    model._tp_plan = {"lm_head": "grouped_gemm"}
    expect_refusal(UsageError, "'grouped_gemm'", make_plan, model, 2, TensorOptions(plan="transformers"))
    assert make_plan(model, 2).source == "inferred"
    mlp = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    mlp = {f"model.layers.*.mlp.{name}": style for name, style in mlp.items()}
    model._tp_plan = {"lm_head": "grouped_gemm", "model.layers.*.mlp.up_proj.weight": "local", **mlp}
    plan = make_plan(model, 2)
    assert len(plan.styles) == 6
    assert plan.left == {"lm_head": "the model's own plan says 'grouped_gemm', which is unknown here"}


def test_a_plan_of_whole_modules_leaves_them_out_of_the_one_that_is_found() -> None:
    found = infer(problem.GPT())
    for pattern in ("blocks.*.mlp", "blocks.*.mlp.0"):
        plan = make_plan(problem.GPT(), 2, TensorOptions(plan={pattern: "replicate"}))
        assert plan.styles == {name: s for name, s in found.styles.items() if ".mlp" not in name}
        assert plan.left["blocks.1.mlp.2"] == "tp_plan keeps it whole"
