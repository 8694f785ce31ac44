"""Tiny models and the files they are kept in, made as the usual tools make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

VOCAB = 96
LAYERS = 2


def tiny_model(model_type: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "hidden_size": 64, "eos_token_id": 2, "bos_token_id": 1}
    llama = {
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    if model_type == "bloom":
        model = BloomForCausalLM(BloomConfig(**shape, **{"n_layer": LAYERS, "n_head": 4} | changes))
    elif model_type == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape, **llama | {"head_dim": 32} | changes))
    elif model_type == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape, **llama | changes))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape, **llama | changes))
    for parameter in model.parameters():  # biases and norms begin as constants, which would hide a mix-up
        torch.nn.init.normal_(parameter)
    return model


def save_as_gguf(
    model: PreTrainedModel, path: Path, add: dict[str, Any] | None = None, *, split_max_tensors: int = 0
) -> Path:
    """Write ``model`` in float32 as llama.cpp's converter does; ``add`` holds more tensors and metadata.

    ``split_max_tensors``: of each of several files; 0: one file.
    """
    model_type = model.config.model_type
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[model_type.upper()], LAYERS)
    writer = start_gguf(path, model_type, model.config, split_max_tensors)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        gguf_name = names.get_name(name.removeprefix("transformer."), try_suffixes=(".weight", ".bias"))
        writer.add_tensor(gguf_name, convert(name, tensor, model).numpy())
    for name, value in (rope_fields(model.config) | (add or {})).items():
        add_to(writer, name, value)
    return finish(writer, path)


def start_gguf(path: Path, model_type: str, config: Any, split_max_tensors: int = 0) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, model_type, split_max_tensors=split_max_tensors)
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    if model_type == "bloom":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return writer
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None) is not None:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    return writer


def rope_fields(config: Any) -> dict[str, Any]:
    """What the converter writes for scaled rotary positions: Llama 3's as a tensor of factors, others as metadata."""
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default"}
    kind, prefix = rope["rope_type"], f"{config.model_type}.rope.scaling"
    if kind == "default":
        return {}
    if kind == "llama3":
        return {"rope_freqs.weight": llama3_factors(config)}
    fields = {f"{prefix}.type": kind, f"{prefix}.factor": float(rope["factor"])}
    if "original_max_position_embeddings" in rope:
        fields[f"{prefix}.original_context_length"] = rope["original_max_position_embeddings"]
    return fields


def llama3_factors(config: Any) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """By transformers' own scaling."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    dim = 2 * len(scaled)
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, dim, 2) / dim)
    factors: np.ndarray[tuple[int], np.dtype[np.float32]] = (plain / scaled).float().numpy()
    return factors


def add_to(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, np.ndarray):
        writer.add_tensor(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, list):
        writer.add_array(name, value)
    else:
        writer.add_uint32(name, value)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(name: str, tensor: Tensor, model: PreTrainedModel) -> Tensor:
    """The order of rows that llama.cpp wants."""
    config = model.config
    if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
        n_heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = tensor.reshape(n_heads, 2, tensor.shape[0] // n_heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()
    if "query_key_value" in name:
        by_head = tensor.reshape(config.n_head, 3, -1, *tensor.shape[1:])
        return torch.cat([by_head[:, third].reshape(-1, *tensor.shape[1:]) for third in range(3)])
    return tensor
