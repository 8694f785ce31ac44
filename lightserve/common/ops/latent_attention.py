"""Multi-head latent attention (MLA): a token caches one latent, from which the keys and values of all heads come.

``latent_cache`` is ``[slots, 1, rank + rope]``: the normed latent, then a rotated key part that all heads share. Or it
has 8-bit codes of the latents (``kv_cache.py``).
``kv_b`` ``[heads, nope + value, rank]`` expands a latent to the other part of each head's key and to its value. Queries
are ``[tokens, heads, nope + rope]`` and results ``[tokens, heads, value]``. A backend need not expand latents: it may
multiply the queries by the key part of ``kv_b`` instead, and compare them with the latents themselves.

Sparse attention chooses the tokens that a query attends to before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.common.ops.attention import AttnBatch, AttnOptions, attention_weights
from lightserve.common.ops.kv_cache import LatentCache, read_latents, store_latents
from lightserve.common.ops.norm import rms_norm
from lightserve.common.ops.registry import op
from lightserve.common.ops.rotary import RotaryAngles, rotary


class LatentNorm(NamedTuple):
    """The RMSNorm of latents."""

    weight: Tensor  # [rank]
    eps: float


class LatentSizes(NamedTuple):
    """The sizes of the arguments of latent attention."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int


def latent_sizes(q: Tensor, latent_cache: LatentCache, kv_b: Tensor) -> LatentSizes:
    heads, expanded, rank = kv_b.shape
    rope = latent_cache.shape[-1] - rank
    nope = q.shape[-1] - rope
    if q.shape[1] != heads or latent_cache.shape[1] != 1 or min(rope, nope, expanded - nope) < 1:
        raise ValueError(
            f"latent attention: heads of q {tuple(q.shape[1:])}, a cache of {tuple(latent_cache.shape[1:])} a token "
            f"and kv_b {tuple(kv_b.shape)} do not match"
        )
    return LatentSizes(heads, nope, rope, expanded - nope, rank)


@op
def write_latent(
    q: Tensor, latent: Tensor, norm: LatentNorm, angles: RotaryAngles | None, slots: Tensor, latent_cache: LatentCache
) -> None:
    """Norm the latents, rotate the shared key part and the last columns of ``q``, all in place; store the latents.

    ``latent`` ``[tokens, rank + rope]``: the latent of each token, then its shared key part. ``angles`` None: the model
    has no positions, and nothing is rotated.
    """
    rank = norm.weight.shape[0]
    latent[:, :rank] = rms_norm(latent[:, :rank], *norm)
    if angles is not None:
        rotary(q[..., rank - latent.shape[1] :], latent[:, None, rank:], *angles)
    store_latents(latent, slots.long(), latent_cache)


@op
def latent_context_attention(
    q: Tensor, latent: Tensor, latent_cache: LatentCache, kv_b: Tensor, batch: AttnBatch, options: AttnOptions
) -> Tensor:
    """Attention of the last rows of each request over its cached tokens.

    ``latent`` ``[tokens, rank + rope]`` holds this step's tokens, which the cache holds too: a backend may read either.
    If the cache is quantised, results depend on which one it reads; a batch-invariant backend reads the cache.
    """
    return _attend(q, latent_cache, kv_b, batch, options)


@op
def latent_token_attention(
    q: Tensor, latent_cache: LatentCache, kv_b: Tensor, batch: AttnBatch, options: AttnOptions
) -> Tensor:
    """Attention of a decode step: row i of ``q`` is the only query row of request i."""
    return _attend(q, latent_cache, kv_b, batch, options)


def _attend(q: Tensor, latent_cache: LatentCache, kv_b: Tensor, batch: AttnBatch, options: AttnOptions) -> Tensor:
    sizes = latent_sizes(q, latent_cache, kv_b)
    out = q.new_empty(len(q), sizes.heads, sizes.value)
    columns = (batch.b_req_idx, batch.b_start_loc, batch.b_seq_len, batch.b_ready_cache_len)
    for req, start, seq_len, ready in zip(*(column.tolist() for column in columns), strict=True):
        rows = slice(start, start + seq_len - ready)
        latents = read_latents(latent_cache, batch.req_to_token[req, :seq_len].long(), torch.float32)
        expanded = torch.einsum("kr,hdr->khd", latents[:, : sizes.rank], kv_b.float())
        shared = latents[:, None, sizes.rank :].expand(-1, sizes.heads, -1)
        k = torch.cat((expanded[..., : sizes.nope], shared), dim=-1)
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k)
        distance = torch.arange(seq_len, device=q.device) - torch.arange(ready, seq_len, device=q.device)[:, None]
        weights = attention_weights(scores, distance, options)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, expanded[..., sizes.nope :]).to(q.dtype)
    return out


@op
def select_tokens(q: Tensor, weights: Tensor, key_cache: Tensor, batch: AttnBatch, top_k: int) -> Tensor:
    """The cache slots of the ``top_k`` tokens with the highest scores for each query: ``[tokens, top_k]`` int32.

    They can be the table of an ``AttnBatch`` in which each query is a request of its own. ``key_cache`` is ``[slots, 1,
    dim]``: small keys, apart from the latents. The score of a token is the sum over heads of ``weights`` ``[tokens,
    heads]``, in float32, times the positive part of the product of ``q`` ``[tokens, heads, dim]`` and its key. A query
    sees the tokens up to its own. The slots are in the order of the tokens; of equal scores the first tokens count.
    Where a query sees fewer tokens than ``top_k``, their slots come first, and the others mean nothing.
    """
    slots = batch.req_to_token.new_zeros(len(q), top_k)
    columns = (batch.b_req_idx, batch.b_start_loc, batch.b_seq_len, batch.b_ready_cache_len)
    for req, start, seq_len, ready in zip(*(column.tolist() for column in columns), strict=True):
        table = batch.req_to_token[req, :seq_len]
        keys = key_cache[table.long(), 0].float()
        for row, count in enumerate(range(ready + 1, seq_len + 1), start):
            products = torch.einsum("hd,kd->hk", q[row].float(), keys[:count]).relu()
            best = best_tokens(weights[row] @ products, top_k)
            slots[row, : len(best)] = table[best]
    return slots


def best_tokens(scores: Tensor, top_k: int) -> Tensor:
    """The numbers of the ``top_k`` highest scores ``[..., tokens]``, in ascending order."""
    order = scores.sort(descending=True, stable=True).indices
    return order[..., :top_k].sort().values
