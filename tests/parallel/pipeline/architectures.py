"""Architectures of transformers from tiny configurations, with a batch each; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.parallel.tensor import architectures as more

ENCODER_DECODER = {
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
SMALL = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 16,
}
OWN: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32},
    "GPTNeoForCausalLM": {
        "num_layers": 4,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 4,
    },
    "GPTJForCausalLM": {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32, "rotary_dim": 4},
    "BloomForCausalLM": {"n_layer": 4, "n_head": 2},
    "FalconForCausalLM": {"new_decoder_architecture": False},
    "MptForCausalLM": {"d_model": 16, "n_heads": 2, "n_layers": 4, "max_seq_len": 32},
    "OPTForCausalLM": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "MambaForCausalLM": {"state_size": 4},
    "T5ForConditionalGeneration": {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 4,
        "num_decoder_layers": 4,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    },
    "BartForConditionalGeneration": {
        **ENCODER_DECODER,
        "decoder_start_token_id": 2,
    },
    "DistilBertForMaskedLM": {"dim": 16, "hidden_dim": 32, "n_layers": 4, "n_heads": 2},
    "ViTForImageClassification": {"image_size": 8, "patch_size": 4, "num_labels": 5},
    "WhisperForConditionalGeneration": {
        **ENCODER_DECODER,
        "num_mel_bins": 8,
        "max_source_positions": 12,
        "max_target_positions": 16,
        "decoder_start_token_id": 2,
    },
    "Gemma3ForCausalLM": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "GemmaForCausalLM": {"head_dim": 8},
    "AlbertForMaskedLM": {"embedding_size": 16},
    "DeepseekV3ForCausalLM": {
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 2,
        "first_k_dense_replace": 1,
    },
}
EQUAL = [
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "GemmaForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "Olmo2ForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoForCausalLM",
    "GPTNeoXForCausalLM",
    "GPTJForCausalLM",
    "BloomForCausalLM",
    "FalconForCausalLM",
    "MptForCausalLM",
    "OPTForCausalLM",
    "MambaForCausalLM",
    "StableLmForCausalLM",
    "BertForMaskedLM",
    "RobertaForMaskedLM",
    "DebertaV2ForMaskedLM",
    "DistilBertForMaskedLM",
    "ElectraForMaskedLM",
    "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "ViTForImageClassification",
    "WhisperForConditionalGeneration",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "OlmoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
]

FURTHER = [name for name in more.ARCHITECTURES if name not in EQUAL]
REFUSED = {
    "AlbertForMaskedLM": ("1 blocks", "2 stages", "blocks=..."),
    "Wav2Vec2ForCTC": ("needs the value of a tensor", "Branch on inputs instead of on activations"),
}
"""What the refusal says."""


def build(name: str) -> nn.Module:
    import transformers

    if name in FURTHER:
        with torch.random.fork_rng():
            return more.make_model(name)

    kind: Any = getattr(transformers, name)
    config_class = kind.config_class
    values = {**SMALL, **OWN.get(name, {})}
    config = config_class()
    known = set(config.to_dict()) | set(getattr(config_class, "attribute_map", {}))
    values |= {key: value for key, value in MOE.items() if key in known and key not in values}
    config = config_class(**{k: v for k, v in values.items() if k in known or k in OWN.get(name, {})})
    for key in config.to_dict():
        if key.endswith(("dropout", "dropout_prob", "dropout_rate", "pdrop", "layerdrop")) and isinstance(
            getattr(config, key, None), float
        ):
            setattr(config, key, 0.0)
    config.use_cache = False
    config.router_aux_loss_coef = 0.0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(config).train()


def batch(name: str, rows: int = 8) -> dict[str, Any]:
    if name in FURTHER:
        two = more.make_batch(name)
        turned = [{k: v.roll(turn, -1) for k, v in two.items()} for turn in range(rows // 2)]
        return {key: torch.cat([one[key] for one in turned]) for key in two}
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 37, (rows, 10), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row % 4] = -100
    if name.startswith("ViT"):
        pixels = torch.randn(rows, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 5, (rows,), generator=generator)}
    if name.startswith("Whisper"):
        return {"input_features": torch.randn(rows, 8, 24, generator=generator), "labels": labels}
    if name.startswith("Mamba"):
        return {"input_ids": ids, "labels": labels}
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
