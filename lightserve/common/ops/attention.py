"""Attention over the token-granular KV cache.

``kv_cache`` is ``[slots, 2 * kv_heads, dim]``, the keys' heads first. A token lives in any slot;
``AttnBatch.req_to_token`` says which.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightserve.common.ops.registry import op


@dataclass(frozen=True, slots=True)
class AttnBatch:
    """Where the tokens of a batch are: among the query rows and in the cache."""

    req_to_token: Tensor  # [rows, max_len] int32: cache slot of every token of every request
    b_req_idx: Tensor  # [batch] int32: the request's row in req_to_token
    b_start_loc: Tensor  # [batch] int32: the request's first query row
    b_seq_len: Tensor  # [batch] int32: tokens in the cache, this step's included
    b_ready_cache_len: Tensor  # [batch] int32: tokens in the cache before this step
    # Some requests may have exactly one query row; a backend may leave those of a context step to the token attention.
    has_decodes: bool = False
    # [groups, 4] int32: of requests that follow one another and have one query row each, the first, how many they are
    # (0: no group), and how many tokens they begin with that lie in the same slots; the last is unused. A hint: a
    # backend may read such a prefix once for all, which changes no result but by rounding.
    shared_prefixes: Tensor | None = None
    # What a backend derives once for all layers of a step that are alike. The key is all that it depends on.
    plans: dict[Hashable, Any] = field(default_factory=dict)


@op
def write_kv(kv: Tensor, slots: Tensor, kv_cache: Tensor) -> None:
    """Store ``[tokens, 2 * kv_heads, dim]`` in the cache, one slot a token."""
    kv_cache[slots.long()] = kv.to(kv_cache.dtype)


@op
def context_attention(
    q: Tensor, kv: Tensor, kv_cache: Tensor, batch: AttnBatch, scale: float, alibi_slopes: Tensor | None = None
) -> Tensor:
    """Causal attention of ``q`` ``[tokens, heads, dim]``: the last rows of each request over all its cached tokens.

    ``kv`` ``[tokens, 2 * kv_heads, dim]`` holds what the cache has of this step's tokens, in the rows of ``q``: a
    backend may read either. ``alibi_slopes`` ``[heads]`` in float32 adds slope * (key position - query position) to
    the scores.
    """
    return _attend(q, kv_cache, batch, scale, alibi_slopes)


@op
def token_attention(
    q: Tensor, kv_cache: Tensor, batch: AttnBatch, scale: float, alibi_slopes: Tensor | None = None
) -> Tensor:
    """Attention of a decode step: one query row a request, row i the i-th request's."""
    return _attend(q, kv_cache, batch, scale, alibi_slopes)


def _attend(q: Tensor, kv_cache: Tensor, batch: AttnBatch, scale: float, alibi_slopes: Tensor | None) -> Tensor:
    out = torch.empty_like(q)
    columns = (batch.b_req_idx, batch.b_start_loc, batch.b_seq_len, batch.b_ready_cache_len)
    for req, start, seq_len, ready in zip(*(column.tolist() for column in columns), strict=True):
        rows = slice(start, start + seq_len - ready)
        kv = kv_cache[batch.req_to_token[req, :seq_len].long()].float()
        k, v = kv.repeat_interleave(2 * q.shape[1] // kv.shape[1], dim=1).chunk(2, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k) * scale
        distance = torch.arange(seq_len, device=q.device) - torch.arange(ready, seq_len, device=q.device)[:, None]
        if alibi_slopes is not None:
            scores += alibi_slopes[:, None, None] * distance
        scores.masked_fill_(distance > 0, float("-inf"))
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out
