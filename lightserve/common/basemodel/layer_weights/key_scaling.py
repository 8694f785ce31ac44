"""Weights for a KV cache in 8 bits: keys with a large bias are divided, and their queries multiplied.

In Qwen2.5, biases of some dimensions are hundreds of times larger than the rest of a key. In int8, a key has one scale
for all of its dimensions, so the large ones leave few bits to the others; in fp8, numbers over 448 are cut off. (fp8
also rounds the large ones by up to 6 %, which factors do not change: see ``FP8_LIMIT``.)

The factors are powers of 2, which floats hold exactly, and equal for both dimensions that a rotation mixes. So the
products of queries and keys stay the same. A factor is the root of how much larger a bias is: that shares the error
between the large dimensions, whose queries are multiplied, and the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.common.basemodel.layer_weights.layer_weight import TransformerLayerWeight
from lightserve.common.basemodel.lora import LinearLora
from lightserve.common.quantization import LinearMethod
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

MIN_TYPICAL = 1.0  # size of a key without its bias, about: smaller biases do not matter
# Keys with a larger factor lose too much in fp8. Perplexity of Qwen2.5-Coder-1.5B, whose largest factor is 16: +29 %.
FP8_LIMIT = 4.0


class KeyLayout(NamedTuple):
    """Of the rows of a fused q, k and v on this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # 0: keys are not rotated


def scale_keys(qkv: LinearMethod, layout: KeyLayout, lora: LinearLora | None = None) -> float:
    """Change the rows of queries and keys, before the method repacks its tensors. Returns the largest factor.

    Adapters of ``lora`` change in the same way when they are loaded.
    """
    heads, kv_heads, dim, rotary_dim = layout
    bias = qkv.bias_of_rows()
    if bias is None:
        return 1.0
    keys = slice(heads * dim, (heads + kv_heads) * dim)
    factors = key_factors(bias[keys].float().view(kv_heads, dim), rotary_dim)
    of_rows = torch.ones_like(bias, dtype=torch.float32)
    of_rows[: keys.start] = factors.repeat_interleave(heads // kv_heads, dim=0).flatten()
    of_rows[keys] = 1 / factors.flatten()
    largest = float(factors.max())
    if largest > 1:
        qkv.scale_rows(of_rows)
    if lora is not None:
        lora.set_row_factors(of_rows)
    return largest


def key_factors(bias: Tensor, rotary_dim: int) -> Tensor:
    """By what the dimensions of keys are divided, from their biases ``[kv_heads, dim]``."""
    half = rotary_dim // 2
    sizes = bias.abs()
    sizes[:, :half] = torch.hypot(bias[:, :half], bias[:, half:rotary_dim])
    sizes[:, half:rotary_dim] = sizes[:, :half]
    typical = sizes.median(dim=1, keepdim=True).values.clamp(min=MIN_TYPICAL)
    return torch.exp2((torch.log2(sizes / typical) / 2).round().clamp(min=0))


def warn_of_large_keys(layers: Sequence[TransformerLayerWeight]) -> None:
    """In fp8."""
    factors = [layer.largest_key_factor for layer in layers]
    if max(factors, default=1.0) > FP8_LIMIT:
        logger.warning(
            "the keys of this model have large biases (layer %d), and fp8 rounds them by up to 6 %%, which costs much "
            "quality; --kv_dtype int8 takes about as much memory without that loss",
            factors.index(max(factors)),
        )
