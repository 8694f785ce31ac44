"""Fields of a transformers ``config.json`` from the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.gguf_header import GgufHeader

# Llama 3.1's values; the conversion to GGUF keeps only the factors computed from them.
LOW_FREQ_FACTOR = 1.0
HIGH_FREQ_FACTOR = 4.0
GEMMA3_27B_LAYERS = 62


def shape_fields(header: GgufHeader) -> dict[str, Any]:
    """Of every architecture."""
    if "token_embd.weight" not in header.tensors:
        raise unsupported(header, "tensor token_embd.weight is missing; convert the model again")
    return {
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": number(header, "embedding_length"),
        "intermediate_size": number(header, "feed_forward_length"),
        "num_hidden_layers": number(header, "block_count"),
        "num_attention_heads": number(header, "attention.head_count"),
        "max_position_embeddings": number(header, "context_length"),
    }


def bloom_fields(header: GgufHeader) -> dict[str, Any]:
    return {
        "n_layer": number(header, "block_count"),
        "n_head": number(header, "attention.head_count"),
        "layer_norm_epsilon": number(header, "attention.layer_norm_epsilon"),
        "tie_word_embeddings": True,  # Bloom has no separate head, but a converter may have written a copy
    }


def rotary_decoder_fields(header: GgufHeader) -> dict[str, Any]:
    """Of Llama and the models that differ from it in few places."""
    n_heads = number(header, "attention.head_count")
    head_dim = number(header, "attention.key_length", number(header, "embedding_length") // n_heads)
    if number(header, "rope.dimension_count", head_dim) != head_dim:
        raise unsupported(header, "rotary embeddings on a part of each head are not supported")
    theta = number(header, "rope.freq_base", 10000.0)
    return {
        "num_key_value_heads": number(header, "attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": number(header, "attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(header, theta, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def gemma3_fields(header: GgufHeader) -> dict[str, Any]:
    """The file has no scale for attention: the 27B model divides the hidden size by the heads, others take head_dim."""
    fields = rotary_decoder_fields(header)
    is_27b = number(header, "block_count") == GEMMA3_27B_LAYERS
    hidden_per_head = number(header, "embedding_length") // number(header, "attention.head_count")
    softcap = number(header, "final_logit_softcapping", 0)
    return fields | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden_per_head if is_27b else fields["head_dim"],
        "sliding_window": number(header, "attention.sliding_window"),
        "sliding_window_pattern": number(header, "attention.sliding_window_pattern", 6),
        "rope_theta": number(header, "rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": number(header, "rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": softcap or None,
    }


def moe_fields(header: GgufHeader) -> dict[str, Any]:
    """Of rotary decoders with experts. Whether weights of experts are renormalised is known by the architecture."""
    fields = rotary_decoder_fields(header)
    fields["num_experts"] = fields["num_local_experts"] = number(header, "expert_count")
    fields["num_experts_per_tok"] = number(header, "expert_used_count")
    fields["norm_topk_prob"] = _architecture(header) == "qwen3moe"
    fields["qkv_bias"] = fields["attention_bias"]
    if "blk.0.ffn_gate_exps.weight" in header.tensors:
        fields["moe_intermediate_size"] = header.tensors["blk.0.ffn_gate_exps.weight"].shape[1]
    if "blk.0.ffn_gate_shexp.weight" in header.tensors:
        fields["shared_expert_intermediate_size"] = header.tensors["blk.0.ffn_gate_shexp.weight"].shape[0]
    return fields


def _rope_scaling(header: GgufHeader, theta: float, head_dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(header, theta, head_dim)
    kind = header.metadata.get(f"{_architecture(header)}.rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = number(header, "rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        context = number(header, "context_length")
        original = number(header, "rope.scaling.original_context_length", round(context / factor))
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise unsupported(header, f"rope scaling {kind!r} is not supported; supported: linear, yarn, llama3")


def _llama3_scaling(header: GgufHeader, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Llama 3.1's scaling, reconstructed from its factor for each frequency."""
    factors = header.floats("rope_freqs.weight")
    factor = round(max(factors), 4)
    if factor == 1:
        return None
    wavelengths = [2 * math.pi * theta ** (2 * i / head_dim) for i in range(head_dim // 2)]
    # Between the bounds, 1/ratio interpolates between 1/factor and 1, so any such ratio yields the original context.
    # Without such a ratio, any original context that scales the same frequencies gives the same factors.
    originals = [
        _original_context(wavelength, 1 / ratio, 1 / factor)
        for wavelength, ratio in zip(wavelengths, factors, strict=False)
        if 1 < ratio < factor * 0.999
    ]
    unscaled = [wavelength for wavelength, ratio in zip(wavelengths, factors, strict=False) if ratio == 1]
    original = round(originals[0]) if originals else math.ceil(HIGH_FREQ_FACTOR * max(unscaled, default=0))
    if len(factors) != head_dim // 2 or not _is_llama3(factors, wavelengths, factor, original):
        raise unsupported(header, "rope_freqs.weight is not Llama 3's scaling; use the model's Hugging Face folder")
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


def _architecture(header: GgufHeader) -> Any:
    return header.metadata.get("general.architecture")


def number(header: GgufHeader, key: str, default: float | None = None) -> Any:
    full_key = f"{_architecture(header)}.{key}"
    value = header.metadata.get(full_key, default)
    if value is None:
        raise unsupported(header, f"metadata {full_key} is missing; convert the model again")
    if not isinstance(value, int | float):
        raise unsupported(header, f"metadata {full_key} differs from layer to layer, which is not supported")
    return value


def unsupported(header: GgufHeader, reason: str) -> ModelFilesError:
    return ModelFilesError(f"{header.path}: {reason}")
