"""GGUF files of Gemma 4, with the metadata that llama.cpp's converter writes for them."""

from __future__ import annotations

import torch

from test.models.architectures import gemma4
from test.models.architectures.case import Case, Json, Tensors
from test.models.gguf_converter import GgufCase, common

GLOBAL_DIM = 24  # of gemma4.GEMMA4
INPUTS = {**gemma4.SHARED, "hidden_size_per_layer_input": 16}  # rows of the table are whole blocks


def _published(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """With the fields of the hub's files, which the converter reads."""
    global_heads = gemma4.EQUAL["num_global_key_value_heads"] if config["attention_k_eq_v"] else None
    config = {key: value for key, value in config.items() if key != "per_layer_config"}
    return {**config, "global_head_dim": GLOBAL_DIM, "num_global_key_value_heads": global_heads}, tensors


def metadata(config: Json) -> Json:
    windows = [kind == gemma4.SLIDING for kind in config["layer_types"]]
    width, layers, shared = config["intermediate_size"], config["num_hidden_layers"], config["num_kv_shared_layers"]
    kv_heads, global_heads = config["num_key_value_heads"], config["num_global_key_value_heads"]
    widths = [width] * (layers - shared) + [2 * width] * shared
    return {
        **common(config),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windows,
        "attention.shared_kv_layers": shared,
        "attention.key_length": GLOBAL_DIM,
        "attention.value_length": GLOBAL_DIM,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.head_count_kv": [kv_heads if windowed else global_heads for windowed in windows]
        if global_heads
        else kv_heads,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "feed_forward_length": widths if config["use_double_wide_mlp"] else width,
        "final_logit_softcapping": config["final_logit_softcapping"],
        "rope.dimension_count": GLOBAL_DIM,
        "rope.dimension_count_swa": config["head_dim"],
        "expert_used_count": config["top_k_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }


def _as_written(tensors: Tensors, config: Json) -> Tensors:
    done = {}
    for name, tensor in tensors.items():
        block = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if name.endswith("router.scale"):
            name = f"{block}.ffn_gate_inp.scale"
        elif name.endswith("per_expert_scale"):
            name = f"{block}.ffn_down_exps.scale"
        elif name.endswith("layer_scalar") or ".experts." in name:
            name += ".weight"
        done[name] = tensor
    share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    rotated = int(GLOBAL_DIM * share / 2)
    return done | {"rope_freqs.weight": torch.tensor([1.0] * rotated + [1e30] * (GLOBAL_DIM // 2 - rotated))}


GEMMA4_CASES = {
    name: GgufCase("gemma4", Case("gemma4_text", fields, _published), metadata, (_as_written,))
    for name, fields in {
        "gemma4": INPUTS,
        "gemma4-equal": {**gemma4.EQUAL, "tie_word_embeddings": False},
        "gemma4-experts": gemma4.EXPERTS,
    }.items()
}
