"""Rotary positions in the metadata of a GGUF file, as fields of a transformers ``config.json``."""

from __future__ import annotations

import math
from typing import Any

from lightserve.model_files.gguf.fields import bad_value, number, number_or_none, unsupported
from lightserve.model_files.gguf.header import GgufHeader

# Llama 3.1's values; the conversion to GGUF keeps only the factors computed from them.
LOW_FREQ_FACTOR = 1.0
HIGH_FREQ_FACTOR = 4.0
YARN_FIELDS = {
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


def rope_fields(header: GgufHeader, head_dim: int, *, can_be_partial: bool = False) -> dict[str, Any]:
    dim = number(header, "rope.dimension_count", head_dim)
    if not 0 < dim <= head_dim or (dim != head_dim and not can_be_partial):
        raise bad_value(header, "rope.dimension_count", dim, f"{head_dim}, the size of a head")
    theta = number(header, "rope.freq_base", 10000.0)
    fields = {"rope_theta": theta, "rope_scaling": _rope_scaling(header, theta, dim)}
    if dim != head_dim:  # rounded up, so that head_dim times it is not less than dim
        fields["partial_rotary_factor"] = math.nextafter(dim / head_dim, 1.0)
    return fields


def _rope_scaling(header: GgufHeader, theta: float, dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(header, theta, dim)
    if "rope_factors_long.weight" in header.tensors:
        return _longrope_scaling(header)
    key = "rope.scaling.type"
    kind = header.metadata.get(f"{header.architecture}.{key}", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": number(header, "rope.scaling.factor")}
    if kind == "yarn":
        return _yarn_scaling(header)
    raise bad_value(header, key, kind, "none, linear, yarn, or longrope with tensor rope_factors_long.weight")


def _yarn_scaling(header: GgufHeader) -> dict[str, Any]:
    factor, context = number(header, "rope.scaling.factor"), number(header, "context_length")
    extrapolation = number(header, "rope.scaling.yarn_ext_factor", 1.0)
    if extrapolation != 1:
        raise bad_value(header, "rope.scaling.yarn_ext_factor", extrapolation, "1")
    original = number(header, "rope.scaling.original_context_length", round(context / factor))
    given = {name: number_or_none(header, key) for key, name in YARN_FIELDS.items()}
    fields = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return fields | {name: value for name, value in given.items() if value is not None}


def with_mscale(scaling: dict[str, Any] | None, mscale: float | None) -> dict[str, Any] | None:
    """The file has one factor for both fields: models have equal ones, so they scale attention, not the angles."""
    if scaling is None or mscale is None:
        return scaling
    return {**scaling, "mscale": mscale, "mscale_all_dim": mscale}


def _longrope_scaling(header: GgufHeader) -> dict[str, Any]:
    if "rope_factors_short.weight" not in header.tensors:
        raise unsupported(header, "tensor rope_factors_short.weight is missing; convert the model again")
    scaling = {
        "rope_type": "longrope",
        "original_max_position_embeddings": number(header, "rope.scaling.original_context_length"),
        "short_factor": header.floats("rope_factors_short.weight"),
        "long_factor": header.floats("rope_factors_long.weight"),
    }
    attention_factor = number_or_none(header, "rope.scaling.attn_factor")
    return scaling if attention_factor is None else {**scaling, "attention_factor": attention_factor}


def _llama3_scaling(header: GgufHeader, theta: float, dim: int) -> dict[str, Any] | None:
    """Llama 3.1's scaling, reconstructed from its factor for each frequency."""
    factors = header.floats("rope_freqs.weight")
    factor = round(max(factors), 4)
    if factor == 1:
        return None
    wavelengths = [2 * math.pi * theta ** (2 * i / dim) for i in range(dim // 2)]
    # Between the bounds, 1/ratio interpolates between 1/factor and 1, so any such ratio yields the original context.
    # Without such a ratio, any original context that scales the same frequencies gives the same factors.
    originals = [
        _original_context(wavelength, 1 / ratio, 1 / factor)
        for wavelength, ratio in zip(wavelengths, factors, strict=False)
        if 1 < ratio < factor * 0.999
    ]
    unscaled = [wavelength for wavelength, ratio in zip(wavelengths, factors, strict=False) if ratio == 1]
    original = round(originals[0]) if originals else math.ceil(HIGH_FREQ_FACTOR * max(unscaled, default=0))
    if len(factors) != dim // 2 or not _is_llama3(factors, wavelengths, factor, original):
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
    return original > 0 and all(math.isclose(actual, expected(length), rel_tol=1e-3) for actual, length in pairs)
