"""Rotary positions in the metadata of a GGUF file, as fields of a transformers ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from lightserve.model_files.gguf.fields import bad_value, number, number_or_none, unsupported
from lightserve.model_files.gguf.header import GgufHeader

# Llama 3.1's values; the conversion to GGUF keeps only the factors computed from them.
LOW_FREQ_FACTOR = 1.0
HIGH_FREQ_FACTOR = 4.0
ROPE_FACTORS = "rope_freqs.weight"
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
    if ROPE_FACTORS in header.tensors:
        return llama3_scaling(header, theta, dim)
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


def llama3_scaling(header: GgufHeader, theta: float, dim: int) -> dict[str, Any] | None:
    """Llama 3.1's scaling, reconstructed from its factor for each frequency."""
    values = header.floats(ROPE_FACTORS)
    factors, of_others = values[: dim // 2], values[dim // 2 :]  # of layers with more rotary dimensions
    factor = round(max(factors), 4)
    if factor == 1:
        return None
    pairs = [(2 * math.pi * theta ** (2 * i / dim), ratio) for i, ratio in enumerate(factors)]
    for high_factor, original in _candidates(pairs, factor):
        is_whole = len(factors) == dim // 2 and all(value == 1 for value in of_others)
        if is_whole and _is_llama3(pairs, factor, original / high_factor, original):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW_FREQ_FACTOR,
                "high_freq_factor": high_factor,
                "original_max_position_embeddings": original,
            }
    raise unsupported(header, f"{ROPE_FACTORS} is not Llama 3's scaling; use the model's Hugging Face folder")


def _candidates(pairs: list[tuple[float, float]], factor: float) -> Iterator[tuple[float, int]]:
    """The factor of the upper bound, and the original context, that the ratios of some wavelengths need.

    Between the bounds 1/ratio goes from 1/factor to 1, so one such ratio yields the original context for a known
    factor, and two yield both. Without such a ratio, any original context that scales the same frequencies does.
    """
    blended = [(length, (factor / ratio - 1) / (factor - 1)) for length, ratio in pairs if 1 < ratio < factor * 0.999]
    longest = max((length for length, ratio in pairs if ratio == 1), default=0)
    for high_factor in (HIGH_FREQ_FACTOR, LOW_FREQ_FACTOR):  # Llama 4 has one bound
        if blended:
            length, smooth = blended[0]
            yield high_factor, round(length * (smooth * (high_factor - LOW_FREQ_FACTOR) + LOW_FREQ_FACTOR))
        else:
            yield high_factor, math.ceil(high_factor * longest)
    if len(blended) > 1:
        (short, first), (long, last) = blended[0], blended[-1]
        span = (long - short) / (short * first - long * last)
        yield round(span + LOW_FREQ_FACTOR, 2), round(short * (1 + first * span))


def _is_llama3(pairs: list[tuple[float, float]], factor: float, unscaled_below: float, scaled_above: float) -> bool:
    def expected(wavelength: float) -> float:
        if wavelength <= unscaled_below or wavelength >= scaled_above:
            return 1.0 if wavelength <= unscaled_below else factor
        high_factor = scaled_above / unscaled_below
        smooth = (scaled_above / wavelength - LOW_FREQ_FACTOR) / (high_factor - LOW_FREQ_FACTOR)
        return 1 / ((1 - smooth) / factor + smooth)

    return scaled_above > 0 and all(math.isclose(ratio, expected(length), rel_tol=1e-3) for length, ratio in pairs)
