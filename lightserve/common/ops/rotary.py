from __future__ import annotations

import torch
from torch import Tensor

from lightserve.common.ops.registry import op


@op
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate ``[tokens, heads, dim]`` in place by each token's angles, ``[tokens, rotary_dim / 2]`` in float32.

    Halves are paired: element i turns with element i + rotary_dim / 2; elements past rotary_dim stay.
    """
    half = cos.shape[-1]
    c, s = cos[:, None, :], sin[:, None, :]
    for x in (q, k):
        low, high = x[..., :half].float(), x[..., half : 2 * half].float()
        x[..., : 2 * half] = torch.cat((low * c - high * s, high * c + low * s), dim=-1).to(x.dtype)
