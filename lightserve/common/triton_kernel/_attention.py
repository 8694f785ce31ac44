"""What both attentions share."""

from __future__ import annotations

from torch import Tensor

from lightserve.common.ops import AttnBatch
from lightserve.common.triton_kernel._blocks import next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous, tensors_of

MIN_DOT = 16  # tl.dot takes no smaller side


def dot_block(size: int) -> int:
    """The smallest side of a dot's operand that holds ``size``."""
    return max(MIN_DOT, next_power_of_2(size))


def check_attention(op: str, q: Tensor, kv_cache: Tensor, batch: AttnBatch) -> None:
    check_last_contiguous(op, q=q, kv_cache=kv_cache, **tensors_of(batch))
    heads, dim = q.shape[1:]
    if kv_cache.shape[2] != dim or 2 * heads % kv_cache.shape[1]:
        raise ValueError(
            f"{op}: {heads} heads of {dim} cannot share the cache's {kv_cache.shape[1] / 2:g} of {kv_cache.shape[2]}"
        )
