"""A GGUF file's metadata, translated to a transformers ``config.json``."""

from __future__ import annotations

import math
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.gguf_header import GgufHeader

SUPPORTED = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "bloom": "BloomForCausalLM"}

# Llama 3.1's values; the conversion to GGUF keeps only the factors computed from them.
LOW_FREQ_FACTOR = 1.0
HIGH_FREQ_FACTOR = 4.0

CONTROL = 3  # a token type: control tokens are never part of plain text


def config_from_gguf(header: GgufHeader) -> dict[str, Any]:
    model_type = _model_type(header)
    if header.metadata.get(f"{model_type}.expert_count", 0):
        raise _unsupported(header, "mixtures of experts are not supported")
    config = _shape(header) | (_bloom(header) if model_type == "bloom" else _llama(header))
    return config | {
        "model_type": model_type,
        "architectures": [SUPPORTED[model_type]],
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": header.metadata.get("tokenizer.ggml.padding_token_id"),
    }


def eos_ids_from_gguf(header: GgufHeader) -> tuple[int, ...]:
    """Every id that ends a turn: eos, eot, eom, and ``<|im_end|>`` if the chat template ends turns with it."""
    named = [header.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ids = {token_id for token_id in named if token_id is not None}
    tokens, types = header.metadata.get("tokenizer.ggml.tokens", []), header.metadata.get("tokenizer.ggml.token_type")
    turn_end = "<|im_end|>"
    if types and turn_end in header.metadata.get("tokenizer.chat_template", "") and turn_end in tokens:
        token_id = tokens.index(turn_end)
        if types[token_id] == CONTROL:
            ids.add(token_id)
    return tuple(sorted(ids))


def _model_type(header: GgufHeader) -> str:
    architecture = header.metadata.get("general.architecture")
    if architecture not in SUPPORTED:
        raise _unsupported(header, f"architecture {architecture!r} is not supported; supported: {', '.join(SUPPORTED)}")
    return str(architecture)


def _shape(header: GgufHeader) -> dict[str, Any]:
    if "token_embd.weight" not in header.tensors:
        raise _unsupported(header, "tensor token_embd.weight is missing; convert the model again")
    return {
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": _number(header, "embedding_length"),
        "intermediate_size": _number(header, "feed_forward_length"),
        "num_hidden_layers": _number(header, "block_count"),
        "num_attention_heads": _number(header, "attention.head_count"),
        "max_position_embeddings": _number(header, "context_length"),
    }


def _bloom(header: GgufHeader) -> dict[str, Any]:
    return {
        "n_layer": _number(header, "block_count"),
        "n_head": _number(header, "attention.head_count"),
        "layer_norm_epsilon": _number(header, "attention.layer_norm_epsilon"),
        "tie_word_embeddings": True,  # Bloom has no separate head, but a converter may have written a copy
    }


def _llama(header: GgufHeader) -> dict[str, Any]:
    n_heads = _number(header, "attention.head_count")
    head_dim = _number(header, "attention.key_length", _number(header, "embedding_length") // n_heads)
    if _number(header, "rope.dimension_count", head_dim) != head_dim:
        raise _unsupported(header, "rotary embeddings on a part of each head are not supported")
    theta = _number(header, "rope.freq_base", 10000.0)
    return {
        "num_key_value_heads": _number(header, "attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _number(header, "attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(header, theta, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _rope_scaling(header: GgufHeader, theta: float, head_dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(header, theta, head_dim)
    kind = header.metadata.get(f"{_model_type(header)}.rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = _number(header, "rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        context = _number(header, "context_length")
        original = _number(header, "rope.scaling.original_context_length", round(context / factor))
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise _unsupported(header, f"rope scaling {kind!r} is not supported; supported: linear, yarn, llama3")


def _llama3_scaling(header: GgufHeader, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Llama 3.1's scaling, reconstructed from its factor for each frequency."""
    factors = header.floats("rope_freqs.weight")
    factor = round(max(factors), 4)
    if factor == 1:
        return None
    wavelengths = [2 * math.pi * theta ** (2 * i / head_dim) for i in range(head_dim // 2)]
    # Between the bounds, 1/ratio interpolates between 1/factor and 1, so any such ratio yields the original context.
    originals = [
        _original_context(wavelength, 1 / ratio, 1 / factor)
        for wavelength, ratio in zip(wavelengths, factors, strict=False)
        if 1 < ratio < factor * 0.999
    ]
    original = round(originals[0]) if originals else 0
    if len(factors) != head_dim // 2 or not _is_llama3(factors, wavelengths, factor, original):
        raise _unsupported(header, "rope_freqs.weight is not Llama 3's scaling; use the model's Hugging Face folder")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW_FREQ_FACTOR,
        "high_freq_factor": HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": original,
    }


def _original_context(wavelength: float, inverse: float, smallest: float) -> float:
    smooth = (inverse - smallest) / (1 - smallest)
    return wavelength * (smooth * (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR) + LOW_FREQ_FACTOR)


def _is_llama3(factors: list[float], wavelengths: list[float], factor: float, original: int) -> bool:
    def expected(wavelength: float) -> float:
        smooth = (original / wavelength - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)
        smooth = min(1.0, max(0.0, smooth))
        return 1 / ((1 - smooth) / factor + smooth)

    pairs = zip(factors, wavelengths, strict=True)
    return original > 0 and all(math.isclose(found, expected(length), rel_tol=1e-3) for found, length in pairs)


def _number(header: GgufHeader, key: str, default: float | None = None) -> Any:
    full_key = f"{_model_type(header)}.{key}"
    value = header.metadata.get(full_key, default)
    if value is None:
        raise _unsupported(header, f"metadata {full_key} is missing; convert the model again")
    if not isinstance(value, int | float):
        raise _unsupported(header, f"metadata {full_key} differs from layer to layer, which is not supported")
    return value


def _unsupported(header: GgufHeader, reason: str) -> ModelFilesError:
    return ModelFilesError(f"{header.path}: {reason}")
