from __future__ import annotations

import torch
from torch import Tensor

from lightserve.common.ops.attention import write_kv
from lightserve.common.ops.registry import op


@op
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate ``[tokens, heads, dim]`` in place by each token's angles, ``[tokens, rotary_dim / 2]`` in float32.

    Element i is paired with element i + rotary_dim / 2; elements past rotary_dim stay as they are.
    """
    half = cos.shape[-1]
    c, s = cos[:, None, :], sin[:, None, :]
    for x in (q, k):
        low, high = x[..., :half].float(), x[..., half : 2 * half].float()
        x[..., : 2 * half] = torch.cat((low * c - high * s, high * c + low * s), dim=-1).to(x.dtype)


@op
def rotary_write_kv(q: Tensor, kv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv_cache: Tensor) -> None:
    """Rotate ``q`` and the keys of ``kv`` in place, then store ``kv`` in the cache: ``rotary`` and ``write_kv``."""
    rotary(q, kv[:, : kv.shape[1] // 2], cos, sin)
    write_kv(kv, slots, kv_cache)
