"""The watermark of Kirchenbauer and others (arXiv 2301.10226), with TGI's numbers.

A hash of the token before decides which half of the vocabulary is green, the same on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.common.ops.registry import op
from lightserve.common.ops.sampling import hash32

GREEN_SHARE = 0.5  # gamma
GREEN_BIAS = 2.0  # delta
HASH_KEY = 15485863  # a large prime


@op
def add_watermark(logits: Tensor, rows: Tensor, b_last: Tensor) -> None:
    """Add GREEN_BIAS in place to the green tokens of ``rows``, int32, each once, after the tokens ``b_last``, int64."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    logits[rows] += is_green(b_last[:, None], tokens) * GREEN_BIAS


def is_green(last: Tensor, token: Tensor) -> Tensor:
    """Whether ``token`` is green after ``last``, both int64."""
    seed = last * HASH_KEY
    key = hash32(hash32(seed & 0xFFFFFFFF) ^ ((seed >> 32) & 0xFFFFFFFF))
    return hash32(key ^ token) < GREEN_SHARE * 2**32
