"""Torch's attention over prompts by ours, whose keys and values are one tensor of packed texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.ops.arguments import FLOATS, have_memory, wants_grad

MAX_HEAD_DIM = 256  # of torch's fast kernels; larger tiles of ours were not compared


def context_attention(  # noqa: PLR0913  as the schema of the fused op
    q: Tensor, kv: Tensor, starts: Tensor, max_len: int, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """The keys and values are their own cache: the token in row i is in slot i."""
    starts = starts.int()
    begins, count = starts[:-1].contiguous(), len(starts) - 1
    rows = torch.arange(count, dtype=torch.int32, device=q.device)
    offsets = torch.arange(max_len, dtype=torch.int32, device=q.device)
    table = (begins[:, None] + offsets).clamp_(max=len(q) - 1)
    batch = ops.AttnBatch(table, rows, begins, starts.diff(), torch.zeros_like(begins))
    return ops.context_attention(q, kv, kv, batch, ops.AttnOptions(scale, causal=causal, window=window))


def takes_prompts(  # noqa: PLR0913  as aten's
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:
    """As many keys as queries, each text whole. A single token is no prompt: keys and values would be copied for it."""
    if attn_mask is not None or dropout_p or wants_grad(q, k, v) or not have_memory(q, k, v):
        return False
    if not q.dim() == k.dim() == v.dim() == 4:
        return False
    (batch, heads, tokens, dim), kv_heads = q.shape, k.shape[1]
    has_heads = heads % max(kv_heads, 1) == 0 if enable_gqa else heads == kv_heads
    do_match = k.shape == v.shape == (batch, kv_heads, tokens, dim) and has_heads
    are_floats = q.dtype in FLOATS and q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    return do_match and are_floats and tokens > 1 and 0 < dim <= MAX_HEAD_DIM and batch > 0 and kv_heads > 0


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, *options: Any, is_causal: bool = False, scale: float | None = None, **_: Any
) -> Tensor:
    batch, heads, tokens, dim = q.shape
    causal = options[2] if len(options) > 2 else is_causal
    kv = torch.cat((k.transpose(1, 2), v.transpose(1, 2)), 2).contiguous()
    starts = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=q.device)
    rows = q.transpose(1, 2).contiguous().view(batch * tokens, heads, dim)
    scale = dim**-0.5 if scale is None else scale
    out = context_attention(rows, kv.view(len(rows), -1, dim), starts, tokens, scale, causal)
    return out.view(batch, tokens, heads, dim).transpose(1, 2)
