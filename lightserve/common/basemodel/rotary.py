"""Tables of every position: the angles of rotary positions, and the factors of queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lightserve.common.basemodel.spec import LayerSpec, QueryScale
from lightserve.model_files.config.model_config import RopeConfig


def rotary_key(spec: LayerSpec) -> str:
    """Equal for layers with the same angles. A string, because every layer of every step looks it up."""
    return f"{spec.rotary_dim} of {spec.rope}"


def rotary_tables(specs: Iterable[LayerSpec], max_len: int) -> dict[str, tuple[Tensor, Tensor]]:
    """By `rotary_key`: cosine and sine of every position's angles, ``[max_len, rotary_dim / 2]`` each."""
    ropes = {rotary_key(spec): (spec.rope, spec.rotary_dim) for spec in specs}
    return {key: rotary_table(rope, dim, max_len) for key, (rope, dim) in ropes.items() if rope is not None}


def query_scale_tables(specs: Iterable[LayerSpec], max_len: int) -> dict[QueryScale, Tensor]:
    """The factor of the query at every position, ``[max_len]``."""
    positions = torch.arange(max_len).float()
    scales = {spec.query_scale for spec in specs if spec.query_scale is not None}
    return {
        scale: 1 + scale.beta * torch.log1p(torch.floor((positions + scale.first) / scale.length)) for scale in scales
    }


def rotary_table(rope: RopeConfig, rotary_dim: int, max_len: int) -> tuple[Tensor, Tensor]:
    if rope.rope_type == "dynamic":
        angles = _dynamic_angles(rope, rotary_dim, max_len)
    else:
        frequencies = _FREQUENCIES[rope.rope_type](rope, rotary_dim, max_len)
        angles = torch.arange(max_len).float()[:, None] * frequencies
    scale = _ATTENTION_FACTORS[rope.rope_type](rope) if rope.rope_type in _ATTENTION_FACTORS else 1.0
    return angles.cos() * scale, angles.sin() * scale


def _default_frequencies(rope: RopeConfig, dim: int, max_len: int = 0) -> Tensor:
    return 1.0 / rope.theta ** (torch.arange(0, dim, 2).float() / dim)


def _proportional_frequencies(rope: RopeConfig, dim: int, max_len: int) -> Tensor:
    """The first ones are those of a whole head, and the others 0."""
    frequencies = _default_frequencies(rope, dim) / rope.factor
    frequencies[int(rope.partial_rotary_factor * dim // 2) :] = 0
    return frequencies


def _linear_frequencies(rope: RopeConfig, dim: int, max_len: int) -> Tensor:
    return _default_frequencies(rope, dim) / rope.factor


def _dynamic_angles(rope: RopeConfig, dim: int, max_len: int) -> Tensor:
    """Past the trained length every position has its own base.

    The angle of a token must not depend on the final length of its request, because its key is cached and shared. These
    are the angles of decoding token by token. For a prompt longer than the trained length, transformers uses one base
    for the whole prompt.
    """
    positions = torch.arange(max_len).double()
    stretched = (rope.factor * (positions + 1) / rope.trained_len - (rope.factor - 1)).clamp(min=1.0)
    base = rope.theta * stretched ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2).double() / dim
    return (positions[:, None] / base[:, None] ** exponents).float()


def _llama3_frequencies(rope: RopeConfig, dim: int, max_len: int) -> Tensor:
    """The factor stretches long waves. Short waves stay, and the ones between are blended, if there are any."""
    frequencies = _default_frequencies(rope, dim)
    turns = rope.original_max_position * frequencies / (2 * math.pi)  # over the trained length
    width = max(rope.high_freq_factor - rope.low_freq_factor, 1e-9)  # Llama 4 has none
    blend = ((turns - rope.low_freq_factor) / width).clamp(0, 1)
    return frequencies * (blend + (1 - blend) / rope.factor)


def _yarn_frequencies(rope: RopeConfig, dim: int, max_len: int) -> Tensor:
    """Like llama3, but the blend is linear over the dimensions between beta_fast and beta_slow rotations."""

    def dimension_of(turns: float) -> float:
        return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    stretch = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return _default_frequencies(rope, dim) * (1 - stretch + stretch / rope.factor)


def yarn_mscale(rope: RopeConfig, weight: float) -> float:
    """The factor by which yarn sharpens attention past the trained length."""
    return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope, rope.mscale) / yarn_mscale(rope, rope.mscale_all_dim)
    return yarn_mscale(rope, 1.0)


def _longrope_frequencies(rope: RopeConfig, dim: int, max_len: int) -> Tensor:
    """Each frequency has its own factor."""
    return _default_frequencies(rope, dim) / torch.tensor(rope.factors(max_len))


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))


_FREQUENCIES: dict[str, Callable[[RopeConfig, int, int], Tensor]] = {
    "default": _default_frequencies,
    "linear": _linear_frequencies,
    "llama3": _llama3_frequencies,
    "longrope": _longrope_frequencies,
    "proportional": _proportional_frequencies,
    "yarn": _yarn_frequencies,
}
_ATTENTION_FACTORS = {"longrope": _longrope_attention_factor, "yarn": _yarn_attention_factor}
