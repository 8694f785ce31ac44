"""Fields of a transformers ``config.json`` from the metadata of a GGUF file."""

from __future__ import annotations

import reprlib
from collections.abc import Collection
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.gguf.header import GgufHeader

RMS_EPS, LAYER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
WINDOW, WINDOW_PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
MAX_LAYERS = 10_000  # a damaged file may have any number
# Options of some architectures, with the values that have no effect. An architecture that does not read an option
# refuses every other value of it.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.temperature_scale": (0,),
    WINDOW: (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
}


def shape_fields(header: GgufHeader) -> dict[str, Any]:
    """Of every architecture. A pruned model has lists with the values of its layers."""
    if "token_embd.weight" not in header.tensors:
        raise unsupported(header, "tensor token_embd.weight is missing; convert the model again")
    return {
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": count(header, "embedding_length"),
        "intermediate_size": counts(
            header, "feed_forward_length", header.metadata.get(f"{header.architecture}.expert_feed_forward_length")
        ),
        "num_hidden_layers": layer_count(header),
        "num_attention_heads": counts(header, "attention.head_count"),
        "max_position_embeddings": number(header, "context_length"),
    }


def attention_fields(header: GgufHeader) -> dict[str, Any]:
    """Of every architecture with heads of one size."""
    heads = counts(header, "attention.head_count")
    most = max(heads) if isinstance(heads, list) else heads
    head_dim = count(header, "attention.key_length", count(header, "embedding_length") // most)
    value_dim = number(header, "attention.value_length", head_dim)
    if value_dim != head_dim:
        raise bad_value(header, "attention.value_length", value_dim, f"{head_dim}, the size of a key")
    return {
        "num_key_value_heads": counts(header, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "attention_bias": has_tensor(header, "attn_q.bias"),
        "mlp_bias": has_tensor(header, "ffn_up.bias"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def window_fields(header: GgufHeader) -> dict[str, Any]:
    """The window, and the layers that have it, if the file says so: a list of them, or every how many have none."""
    window = number(header, WINDOW, 0)
    pattern = header.metadata.get(f"{header.architecture}.{WINDOW_PATTERN}")
    fields: dict[str, Any] = {"sliding_window": window or None}
    if isinstance(pattern, list) and window:
        kinds = ("full_attention", "sliding_attention")
        fields["layer_types"] = [kinds[bool(is_windowed)] for is_windowed in pattern[: layer_count(header)]]
    elif pattern is not None and window:
        fields["sliding_window_pattern"] = number(header, WINDOW_PATTERN)
    return fields


def layer_count(header: GgufHeader) -> int:
    """Without the layers behind the last one that predict more tokens."""
    layers = count(header, "block_count")
    extra = number(header, "nextn_predict_layers", 0)
    if not 0 <= extra < layers:
        raise bad_value(header, "nextn_predict_layers", extra, f"less than block_count, which is {layers}")
    return layers - int(extra)


def has_tensor(header: GgufHeader, name: str) -> bool:
    """In any layer: the first ones may differ."""
    return any(f"blk.{layer}.{name}" in header.tensors for layer in range(min(layer_count(header), MAX_LAYERS)))


def layer_types(header: GgufHeader, recurrent: str = "linear_attention") -> list[str]:
    """By their tensors. Only the layers without attention have a short convolution."""
    convs = ("ssm_conv1d.weight", "ssm_conv1d_q.weight", "shortconv.conv.weight")
    layers = range(min(layer_count(header), MAX_LAYERS))
    is_recurrent = [any(f"blk.{layer}.{conv}" in header.tensors for conv in convs) for layer in layers]
    return [recurrent if has_conv else "full_attention" for has_conv in is_recurrent]


def largest(values: Any) -> Any:
    """Of the numbers of all layers: those without attention have 0 heads."""
    return max(values) if isinstance(values, list) else values


def rows_of(header: GgufHeader, name: str) -> int | None:
    """In the first layer that has the tensor."""
    names = (f"blk.{layer}.{name}" for layer in range(min(layer_count(header), MAX_LAYERS)))
    return next((int(header.tensors[name].shape[0]) for name in names if name in header.tensors), None)


def check_options(header: GgufHeader, known: Collection[str]) -> None:
    """Refuse an option that the architecture does not read."""
    for key, neutral in OPTIONS.items():
        value = header.metadata.get(f"{header.architecture}.{key}", neutral[0])
        if key not in known and value not in neutral:
            raise bad_value(header, key, value, " or ".join(map(str, neutral)))


def count(header: GgufHeader, key: str, default: int | None = None) -> int:
    value = number(header, key, default)
    if not isinstance(value, int) or value < 1:
        raise bad_value(header, key, value, "a positive integer")
    return value


def counts(header: GgufHeader, key: str, default: Any = None) -> Any:
    """One number, or a list of them if layers differ."""
    values = header.metadata.get(f"{header.architecture}.{key}", default)
    if not isinstance(values, list):
        return count(header, key, default)
    layers = layer_count(header)
    known_lengths = (layers, count(header, "block_count"))  # with the layers that predict more tokens
    if len(values) not in known_lengths or not all(isinstance(value, int) and value >= 0 for value in values):
        raise bad_value(header, key, values, f"a number for each of {layers} layers")
    values = values[:layers]
    if not any(values):
        raise bad_value(header, key, values, "a positive number in some layer")
    return values if len(set(values)) > 1 else values[0]


def number(header: GgufHeader, key: str, default: float | None = None) -> Any:
    value = header.metadata.get(f"{header.architecture}.{key}", default)
    if value is None:
        raise unsupported(header, f"metadata {header.architecture}.{key} is missing; convert the model again")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_value(header, key, value, "one number for all layers")
    return value


def number_or_none(header: GgufHeader, key: str) -> Any:
    return number(header, key) if f"{header.architecture}.{key}" in header.metadata else None


def flag(header: GgufHeader, key: str, default: bool) -> bool:
    value = header.metadata.get(f"{header.architecture}.{key}", default)
    if not isinstance(value, bool):
        raise bad_value(header, key, value, "true or false")
    return value


def bad_value(header: GgufHeader, key: str, value: Any, wanted: str) -> ModelFilesError:
    return unsupported(
        header,
        f"metadata {header.architecture}.{key} is {reprlib.repr(value)}, which is not supported; wanted {wanted}",
    )


def unsupported(header: GgufHeader, reason: str) -> ModelFilesError:
    return ModelFilesError(f"{header.path}: {reason}")
