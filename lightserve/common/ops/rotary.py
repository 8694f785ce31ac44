from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.common.ops.attention import write_kv
from lightserve.common.ops.kv_cache import KvCache
from lightserve.common.ops.norm import rms_norm
from lightserve.common.ops.registry import op


class HeadNorms(NamedTuple):
    """RMSNorm over each head of the queries and of the keys."""

    q_weight: Tensor  # [dim]
    k_weight: Tensor  # [dim]
    eps: float


class RotaryAngles(NamedTuple):
    """Of each token, ``[tokens, rotary_dim / 2]`` in float32."""

    cos: Tensor
    sin: Tensor


@op
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate ``[tokens, heads, dim]`` in place by each token's angles, ``[tokens, rotary_dim / 2]`` in float32.

    Element i is paired with element i + rotary_dim / 2; elements past rotary_dim stay as they are. ``k`` may have no
    heads.
    """
    half = cos.shape[-1]
    c, s = cos[:, None, :], sin[:, None, :]
    for x in (q, k):
        low, high = x[..., :half].float(), x[..., half : 2 * half].float()
        x[..., : 2 * half] = torch.cat((low * c - high * s, high * c + low * s), dim=-1).to(x.dtype)


@op
def rotary_write_kv(q: Tensor, kv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv_cache: KvCache) -> None:
    """Rotate ``q`` and the keys of ``kv`` in place, then store ``kv`` in the cache: ``rotary`` and ``write_kv``."""
    rotary(q, kv[:, : kv.shape[1] // 2], cos, sin)
    write_kv(kv, slots, kv_cache)


@op
def norm_rotary_write_kv(
    q: Tensor, kv: Tensor, norms: HeadNorms, angles: RotaryAngles, slots: Tensor, kv_cache: KvCache
) -> None:
    """``rms_norm`` of ``q`` and of the keys of ``kv`` in place, then ``rotary_write_kv``."""
    k = kv[:, : kv.shape[1] // 2]
    q.copy_(rms_norm(q, norms.q_weight, norms.eps))
    k.copy_(rms_norm(k, norms.k_weight, norms.eps))
    rotary_write_kv(q, kv, *angles, slots, kv_cache)
