"""Checkpoints of models that transformers does not know, from tiny models of classes that compute the same."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from lightserve.common.basemodel import alibi_slopes
from test.models.architectures.case import Json, Tensors

QWEN_NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.h",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.gate_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w1",
    "mlp.down_proj": "mlp.c_proj",
}
INTERNLM2_NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.qkv_proj": "attention.wqkv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
CHATGLM_NAMES = {
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "lm_head": "transformer.output_layer",
    "model.norm": "transformer.encoder.final_layernorm",
    "model.layers": "transformer.encoder.layers",
    "self_attn.qkv_proj": "self_attention.query_key_value",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
BAILING_NAMES = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.qkv_proj": "attention.query_key_value",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
    "mlp.shared_expert.": "mlp.shared_experts.",
}
BAILING_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "norm_topk_prob",
    "tie_word_embeddings",
)


def to_internlm(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """From Llama with attention_bias."""
    has_bias = config.pop("attention_bias")
    rope = config.pop("rope_parameters")
    rotary = {"base": rope["rope_theta"], "type": "dynamic"}
    return {**config, "model_type": "internlm", "bias": has_bias, "rotary": rotary}, tensors


def to_internlm2(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """From Llama. Each KV head comes with its query heads."""
    has_bias = config.pop("attention_bias")
    kv_heads = config["num_key_value_heads"]

    def by_kv_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [part.view(kv_heads, -1, *part.shape[1:]) for part in (q, k, v)]
        return torch.cat(parts, dim=1).flatten(0, 1)

    config = {**config, "model_type": "internlm2", "bias": has_bias, "attention_bias": None}
    return config, renamed(fused(tensors, by_kv_heads), INTERNLM2_NAMES)


def to_internlm3(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """From Llama with mlp_bias and attention_bias."""
    both = {"bias": config.pop("mlp_bias"), "qkv_bias": config.pop("attention_bias")}
    return {**config, "model_type": "internlm3", **both}, tensors


def to_baichuan(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """From Llama with as many KV heads as heads."""
    config.pop("num_key_value_heads")
    return {**config, "model_type": "baichuan"}, renamed(fused(tensors), {"qkv_proj": "W_pack"})


def to_baichuan_13b(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    config, tensors = to_baichuan(config, tensors)
    max_len = config.pop("max_position_embeddings")
    return {**config, "model_max_length": max_len}, tensors


def to_qwen(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """From Qwen2 with as many KV heads as heads."""
    dim = config["hidden_size"] // config["num_attention_heads"]
    qwen = {
        **{key: config[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
        "model_type": "qwen",
        "intermediate_size": 2 * config["intermediate_size"],
        "kv_channels": dim,
        "layer_norm_epsilon": config["rms_norm_eps"],
        "rotary_emb_base": config["rope_parameters"]["rope_theta"],
        "rotary_pct": 1.0,
        "seq_length": config["max_position_embeddings"],
        "max_position_embeddings": 4 * config["max_position_embeddings"],
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "no_bias": True,
        "tie_word_embeddings": False,
    }
    return qwen, renamed(fused(tensors), QWEN_NAMES)


def to_chatglm(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """From GLM."""
    chatglm = {
        **{key: config[key] for key in ("hidden_size", "num_attention_heads")},
        "model_type": "chatglm",
        "num_layers": config["num_hidden_layers"],
        "padded_vocab_size": config["vocab_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "kv_channels": config["head_dim"],
        "multi_query_attention": config["num_key_value_heads"] != config["num_attention_heads"],
        "multi_query_group_num": config["num_key_value_heads"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "seq_length": config["max_position_embeddings"],
        "rope_ratio": config["rope_parameters"]["rope_theta"] / 10_000,
        "add_qkv_bias": config["attention_bias"],
        "tie_word_embeddings": False,
    }
    tensors = renamed(fused(tensors), CHATGLM_NAMES)
    return chatglm, {**tensors, "transformer.rotary_pos_emb.inv_freq": torch.ones(4)}


def to_minicpm(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """From Granite."""
    factors = {
        "scale_emb": config.pop("embedding_multiplier"),
        "scale_depth": config.pop("residual_multiplier") * config["num_hidden_layers"] ** 0.5,
        "dim_model_base": config["hidden_size"] / config.pop("logits_scaling"),
    }
    config.pop("attention_multiplier")
    if config["tie_word_embeddings"]:
        config.pop("tie_word_embeddings")
    return {**config, "model_type": "minicpm", **factors}, tensors


class AlibiLlama:
    """Llama with ALiBi instead of rotary positions: transformers has no such class."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self._slopes = torch.tensor(alibi_slopes(hf.config.num_attention_heads))
        hf.model.rotary_emb = NoRotation(hf.config.hidden_size // hf.config.num_attention_heads)

    def __call__(self, ids: Tensor) -> Any:
        positions = torch.arange(ids.shape[1])
        distance = positions - positions[:, None]
        mask = (self._slopes[:, None, None] * distance).masked_fill(distance > 0, float("-inf"))
        return self._hf(ids, attention_mask=mask[None])


class NoRotation(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self._dim = dim

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*position_ids.shape, self._dim)
        return torch.ones(shape), torch.zeros(shape)


def fused(tensors: Tensors, join: Any = lambda *parts: torch.cat(parts)) -> Tensors:
    """q, k and v of each layer as one tensor."""
    found = dict(tensors)
    for name in tensors:
        if ".q_proj." in name:
            names = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
            found[name.replace("q_proj", "qkv_proj")] = join(*(found.pop(one) for one in names))
    return found


def renamed(tensors: Tensors, names: dict[str, str]) -> Tensors:
    pattern = re.compile("|".join(map(re.escape, names)))
    return {pattern.sub(lambda match: names[match[0]], name): tensor for name, tensor in tensors.items()}


def to_bailing(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """From Qwen2-MoE without biases. The gate of the shared expert is in the oracle only."""
    bailing = {
        **{key: config[key] for key in BAILING_FIELDS},
        "model_type": "bailing_moe",
        "num_experts": config["num_experts"],
        "num_shared_experts": config["shared_expert_intermediate_size"] // config["moe_intermediate_size"],
        "first_k_dense_replace": 0,
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "rope_scaling": None,
        "use_qkv_bias": config["qkv_bias"],
    }
    kept = {name: tensor for name, tensor in tensors.items() if "shared_expert_gate" not in name}
    return bailing, renamed(fused(kept), BAILING_NAMES)


def without_shared_gate(hf: Any) -> Any:
    for layer in hf.model.layers:
        layer.mlp.shared_expert_gate = OpenGate()
    return hf


class OpenGate(nn.Module):
    """100, whose sigmoid is 1."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.full((*x.shape[:-1], 1), 100.0)


def to_bailing_v2(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """From GLM-4.5."""
    bailing = {
        **{key: config[key] for key in (*BAILING_FIELDS, "n_group", "topk_group", "routed_scaling_factor")},
        "model_type": "bailing_moe_v2",
        "head_dim": config["head_dim"],
        "num_experts": config["n_routed_experts"],
        "num_shared_experts": config["n_shared_experts"],
        "moe_shared_expert_intermediate_size": config["n_shared_experts"] * config["moe_intermediate_size"],
        "first_k_dense_replace": config["first_k_dense_replace"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "score_function": "sigmoid",
        "use_qk_norm": config["use_qk_norm"],
    }
    return bailing, renamed(fused(tensors), BAILING_NAMES)
