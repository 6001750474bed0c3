"""Architectures of transformers, from tiny configurations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KV = {"num_key_value_heads": 2}
DEEPSEEK = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
T5_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
BART_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
PATCHES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 12,
    "patch_size": 4,
    "num_labels": 5,
}

# name of the class -> (what its configuration differs in from SIZES, what its batches are)
ARCHITECTURES: dict[str, tuple[dict[str, Any], str]] = {
    "LlamaForCausalLM": (KV, "causal"),
    "MistralForCausalLM": (KV, "causal"),
    "Qwen2ForCausalLM": (KV, "causal"),
    "Qwen3ForCausalLM": (KV | {"head_dim": 8}, "causal"),
    "GemmaForCausalLM": (KV | {"head_dim": 8}, "causal"),
    "Gemma2ForCausalLM": (KV | {"head_dim": 8}, "causal"),
    "Gemma3ForCausalLM": (KV | {"head_dim": 8}, "causal"),
    "Phi3ForCausalLM": (KV, "causal"),
    "Olmo2ForCausalLM": (KV, "causal"),
    "CohereForCausalLM": (KV, "causal"),
    "StableLmForCausalLM": (KV, "causal"),
    "Starcoder2ForCausalLM": (KV, "causal"),
    "GlmForCausalLM": (KV | {"head_dim": 8}, "causal"),
    "GraniteForCausalLM": (KV, "causal"),
    "HeliumForCausalLM": (KV | {"head_dim": 8}, "causal"),
    "DogeForCausalLM": (KV, "causal"),
    "GPT2LMHeadModel": ({}, "causal"),
    "GPTNeoXForCausalLM": ({}, "causal"),
    "GPTJForCausalLM": ({"rotary_dim": 4}, "causal"),
    "OPTForCausalLM": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, "causal"),
    "BloomForCausalLM": ({}, "causal"),
    "FalconForCausalLM": ({}, "causal"),
    "PhiForCausalLM": ({}, "causal"),
    "MambaForCausalLM": ({}, "causal"),
    "MixtralForCausalLM": (KV | EXPERTS | {"num_local_experts": 4}, "causal"),
    "OlmoeForCausalLM": (KV | EXPERTS, "causal"),
    "Qwen2MoeForCausalLM": (KV | EXPERTS | {"shared_expert_intermediate_size": 24}, "causal"),
    "Qwen3MoeForCausalLM": (KV | EXPERTS | {"head_dim": 8}, "causal"),
    "Qwen3NextForCausalLM": (
        KV
        | EXPERTS
        | {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
        | {
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "causal",
    ),
    "DeepseekV3ForCausalLM": (
        DEEPSEEK,
        "causal",
    ),
    "DeepseekV2ForCausalLM": (
        DEEPSEEK | {"head_dim": 4},
        "causal",
    ),
    "BertForMaskedLM": ({}, "masked"),
    "RobertaForMaskedLM": ({}, "masked"),
    "DistilBertForMaskedLM": ({"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}, "masked"),
    "AlbertForMaskedLM": ({"embedding_size": 16}, "masked"),
    "DebertaV2ForMaskedLM": ({"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "masked"),
    "MPNetForMaskedLM": ({}, "masked"),
    "ModernBertForMaskedLM": ({}, "masked"),
    "ElectraForMaskedLM": ({"embedding_size": 16}, "masked"),
    "T5ForConditionalGeneration": (T5_SIZES, "seq2seq"),
    "MT5ForConditionalGeneration": (T5_SIZES | {"feed_forward_proj": "gated-gelu"}, "seq2seq"),
    "BartForConditionalGeneration": (BART_SIZES, "seq2seq"),
    "PegasusForConditionalGeneration": (BART_SIZES, "seq2seq"),
    "ViTForImageClassification": (PATCHES, "image"),
    "DeiTForImageClassification": (PATCHES | {"image_size": 16}, "image"),
    "BeitForImageClassification": (PATCHES | {"use_shared_relative_position_bias": True}, "image"),
    "Dinov2ForImageClassification": (PATCHES | {"mlp_ratio": 2}, "image"),
    "Wav2Vec2ForCTC": (
        {"conv_dim": [16, 16], "conv_kernel": [4, 3], "conv_stride": [2, 2], "num_feat_extract_layers": 2}
        | {
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0,
            "layerdrop": 0.0,
        },
        "speech",
    ),
}

OFF = {
    "attention_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
    "embedding_dropout": 0.0,
    "residual_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "classifier_dropout": 0.0,
    "resid_dropout": 0.0,
    "drop_path_rate": 0.0,
    "seq_classif_dropout": 0.0,
}


def make_model(name: str) -> nn.Module:
    import transformers

    changes, kind = ARCHITECTURES[name]
    model_class = getattr(transformers, name)
    sizes = {} if kind in ("seq2seq", "image") else SIZES
    config = model_class.config_class(**sizes)
    for key, value in {**OFF, **changes}.items():
        if hasattr(config, key) or key in changes:
            setattr(config, key, value)
    # Made anew, so that what depends on other values is computed of them.
    given = {key: value for key, value in {**sizes, **OFF, **changes}.items() if hasattr(config, key)}
    torch.manual_seed(0)
    model: nn.Module = model_class(model_class.config_class(**given))
    numbers = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():  # no zeros, which would hide what is wrong
            parameter.add_(torch.randn(parameter.shape, generator=numbers), alpha=0.05)
    return model.train()


def make_batch(name: str) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 60, (2, 8), generator=numbers)
    labels = torch.randint(3, 60, (2, 12), generator=numbers)
    kind = ARCHITECTURES[name][1]
    if kind == "image":
        size = ARCHITECTURES[name][0]["image_size"]
        return {
            "pixel_values": torch.randn(2, 3, size, size, generator=numbers),
            "labels": torch.tensor([1, 3]),
        }
    if kind == "speech":
        return {"input_values": torch.randn(2, 68, generator=numbers), "labels": labels[:, :3]}
    if kind == "seq2seq":
        return {"input_ids": tokens, "labels": labels}
    return {"input_ids": tokens, "labels": tokens.flip(1) if kind == "masked" else tokens}


def difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """By norm; gradients that are tiny next to others (of a bias of keys: zero) count by the others' size."""
    assert actual.keys() == expected.keys()
    size = max(g.norm().item() / g.numel() ** 0.5 for g in expected.values())
    return max(
        ((actual[n] - g).norm() / max(g.norm().item(), 1e-4 * size * g.numel() ** 0.5)).item()
        for n, g in expected.items()
    )
