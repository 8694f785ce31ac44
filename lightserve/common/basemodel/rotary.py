"""Rotary positions: a table with the angles of every position, and the rows of it that a step needs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightserve.common.basemodel.basemodel import TpPartBaseModel
from lightserve.common.basemodel.infer_struct import InferStateInfo
from lightserve.model_files.model_config import ModelConfig, RopeConfig


class RotaryInferStateInfo(InferStateInfo):
    """Adds the rotary angles of every token, ``[tokens, rotary_dim / 2]`` in float32."""

    position_cos: Tensor
    position_sin: Tensor

    def init_some_extra_state(self, model: TpPartBaseModel, input_ids: Tensor) -> None:
        super().init_some_extra_state(model, input_ids)
        assert isinstance(model, RotaryModel)
        self.position_cos = model.cos_table.index_select(0, self.position_ids)
        self.position_sin = model.sin_table.index_select(0, self.position_ids)


class RotaryModel(TpPartBaseModel):
    """A model with rotary positions."""

    infer_state_class = RotaryInferStateInfo

    cos_table: Tensor
    sin_table: Tensor

    def _init_some_value(self) -> None:
        super()._init_some_value()
        cos, sin = rotary_table(self.config, self.req_manager.max_len)
        self.cos_table, self.sin_table = cos.to(self.device), sin.to(self.device)


def rotary_table(config: ModelConfig, max_len: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, ``[max_len, rotary_dim / 2]`` each."""
    rope = config.rope
    rotary_dim = int(config.head_dim * rope.partial_rotary_factor)
    if rope.rope_type == "dynamic":
        angles = _dynamic_angles(rope, config.max_position, rotary_dim, max_len)
    else:
        angles = torch.arange(max_len).float()[:, None] * _FREQUENCIES[rope.rope_type](rope, rotary_dim)
    scale = _yarn_attention_factor(rope) if rope.rope_type == "yarn" else 1.0
    return angles.cos() * scale, angles.sin() * scale


def _default_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    return 1.0 / rope.theta ** (torch.arange(0, dim, 2).float() / dim)


def _linear_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    return _default_frequencies(rope, dim) / rope.factor


def _dynamic_angles(rope: RopeConfig, trained_len: int, dim: int, max_len: int) -> Tensor:
    """Past the trained length every position has its own base.

    The angle of a token must not depend on the final length of its request, because its key is cached and shared. These
    are the angles of decoding token by token. For a prompt longer than the trained length, transformers uses one base
    for the whole prompt.
    """
    positions = torch.arange(max_len).double()
    stretched = (rope.factor * (positions + 1) / trained_len - (rope.factor - 1)).clamp(min=1.0)
    base = rope.theta * stretched ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2).double() / dim
    return (positions[:, None] / base[:, None] ** exponents).float()


def _llama3_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """The factor stretches long waves. Short waves stay, and the ones between are blended."""
    frequencies = _default_frequencies(rope, dim)
    turns = rope.original_max_position * frequencies / (2 * math.pi)  # over the trained length
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequencies * (blend + (1 - blend) / rope.factor)


def _yarn_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Like llama3, but the blend is linear over the dimensions between beta_fast and beta_slow rotations."""

    def dimension_of(turns: float) -> float:
        return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    stretch = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return _default_frequencies(rope, dim) * (1 - stretch + stretch / rope.factor)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


_FREQUENCIES: dict[str, Callable[[RopeConfig, int], Tensor]] = {
    "default": _default_frequencies,
    "linear": _linear_frequencies,
    "llama3": _llama3_frequencies,
    "yarn": _yarn_frequencies,
}
