"""Latent attention by torch: prompts with expanded keys and values, single rows absorbed.

A single row of ``heads`` queries over n tokens takes ``heads * n * 2 * rank`` multiplications absorbed, and about
``nope + value`` times as many if all latents are expanded first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common import ops
from lightserve.common.ops import AttnBatch, AttnOptions
from lightserve.common.ops.kv_cache import LatentCache, read_latents
from lightserve.common.ops.latent_attention import LatentSizes, latent_sizes

ROWS_AT_ONCE = 256  # of a prompt: the scores of a whole prompt take heads * length^2 numbers


class _Request(NamedTuple):
    rows: slice  # of the queries
    slots: Tensor  # [seq_len]
    ready_len: int


@ops.latent_context_attention.impl("cpu")
def latent_context_attention(
    q: Tensor, latent: Tensor, latent_cache: LatentCache, kv_b: Tensor, batch: AttnBatch, options: AttnOptions
) -> Tensor:
    return _attend(q, latent_cache, kv_b, batch, options)


@ops.latent_token_attention.impl("cpu")
def latent_token_attention(
    q: Tensor, latent_cache: LatentCache, kv_b: Tensor, batch: AttnBatch, options: AttnOptions
) -> Tensor:
    return _attend(q, latent_cache, kv_b, batch, options)


def _attend(q: Tensor, latent_cache: LatentCache, kv_b: Tensor, batch: AttnBatch, options: AttnOptions) -> Tensor:
    options.check_supported("cpu")
    sizes = latent_sizes(q, latent_cache, kv_b)
    out = q.new_empty(len(q), sizes.heads, sizes.value)
    for rows, slots, ready_len in _requests(batch):
        latents = read_latents(latent_cache, slots, q.dtype)
        if rows.stop - rows.start == 1:
            out[rows] = _attend_absorbed(q[rows.start], latents, kv_b, options.scale, sizes)
        else:
            out[rows] = _attend_expanded(q[rows], latents, kv_b, ready_len, options.scale, sizes)
    return out


def _requests(batch: AttnBatch) -> list[_Request]:
    """Those with new tokens; all layers of a step share them that have the same table."""
    requests: list[_Request]
    table, requests = batch.plans.get("cpu latents", (None, []))
    if table is not batch.req_to_token:
        columns = (batch.b_req_idx, batch.b_start_loc, batch.b_seq_len, batch.b_ready_cache_len)
        requests = [
            _Request(slice(start, start + seq_len - ready), batch.req_to_token[req, :seq_len].long(), ready)
            for req, start, seq_len, ready in zip(*(column.tolist() for column in columns), strict=True)
            if seq_len > ready
        ]
        batch.plans["cpu latents"] = batch.req_to_token, requests
    return requests


def _attend_absorbed(q: Tensor, latents: Tensor, kv_b: Tensor, scale: float, sizes: LatentSizes) -> Tensor:
    """Of one row ``[heads, nope + rope]``."""
    absorbed = torch.bmm(q[:, None, : sizes.nope], kv_b[:, : sizes.nope])[:, 0]
    scores = torch.cat((absorbed, q[:, sizes.nope :]), dim=1) @ latents.T
    weights = (scores.float() * scale).softmax(-1).to(q.dtype)
    attended = weights @ latents[:, : sizes.rank]
    return torch.bmm(kv_b[:, sizes.nope :], attended[:, :, None])[..., 0]


def _attend_expanded(
    q: Tensor, latents: Tensor, kv_b: Tensor, ready_len: int, scale: float, sizes: LatentSizes
) -> Tensor:
    """Of the last rows ``[rows, heads, nope + rope]`` of a request."""
    kv = ops.linear(latents[:, : sizes.rank], kv_b.flatten(0, 1)).view(len(latents), *kv_b.shape[:2]).transpose(0, 1)
    shared = latents[None, :, sizes.rank :].expand(sizes.heads, -1, -1)
    k, v = torch.cat((kv[..., : sizes.nope], shared), dim=-1), kv[..., sizes.nope :]
    outs = []
    for first in range(0, len(q), ROWS_AT_ONCE):
        queries = q[first : first + ROWS_AT_ONCE].transpose(0, 1)
        begin = ready_len + first
        end = begin + queries.shape[1]
        is_seen = torch.arange(end) <= torch.arange(begin, end)[:, None]
        outs.append(F.scaled_dot_product_attention(queries, k[:, :end], v[:, :end], is_seen, scale=scale))
    return torch.cat(outs, dim=1).transpose(0, 1)
