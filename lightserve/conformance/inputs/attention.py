"""Inputs of attention: requests with scattered slots between NaN."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.conformance.inputs.tensors import NAN, ints, randn


def attention_args(
    lens: list[tuple[int, int]], heads: tuple[int, int], dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, ops.AttnBatch, ops.AttnOptions]:
    """``lens``: (tokens in the cache, new tokens) of each request; ``heads``: of queries, of keys.

    The queries are a part of a fused qkv, the cache a layer of a bigger one, the slots scattered. All else is NaN, and
    the table's entries past a request's end name a slot of NaN.
    """
    q_heads, kv_heads = heads
    seq_lens = [ready + new for ready, new in lens]
    used, tokens = sum(seq_lens), sum(new for _, new in lens)
    cache = torch.full((used + 3, 2, 2 * kv_heads, dim), NAN, dtype=dtype, device=device)[:, 1]
    order = torch.randperm(used + 3, generator=torch.Generator().manual_seed(used)).tolist()
    slots, nan_slot = order[:used], order[used]
    cache[slots] = randn(used, 2 * kv_heads, dim, dtype=dtype, device=device, seed=1)

    table = torch.full((len(lens) + 2, max(seq_lens, default=0) + 2), nan_slot, dtype=torch.int32, device=device)
    req_idx = list(range(len(lens) + 1, 1, -1))
    for row, seq_len in zip(req_idx, seq_lens, strict=True):
        table[row, :seq_len] = ints([slots.pop() for _ in range(seq_len)], device)

    fused = torch.full((tokens, q_heads + 2 * kv_heads, dim), NAN, dtype=dtype, device=device)
    q = fused[:, :q_heads]
    q.copy_(randn(tokens, q_heads, dim, dtype=dtype, device=device, seed=2))
    return q, cache, batch_of(lens, table, req_idx), ops.AttnOptions(dim**-0.5)


def batch_of(lens: list[tuple[int, int]], table: Tensor, req_idx: list[int]) -> ops.AttnBatch:
    """``lens``: (tokens in the cache, new tokens) of each request, whose row of the table is in ``req_idx``."""
    return ops.AttnBatch(
        req_to_token=table,
        b_req_idx=ints(req_idx, table.device.type),
        b_start_loc=ints([sum(new for _, new in lens[:i]) for i in range(len(lens))], table.device.type),
        b_seq_len=ints([ready + new for ready, new in lens], table.device.type),
        b_ready_cache_len=ints([ready for ready, _ in lens], table.device.type),
    )


Groups = list[tuple[int, int, int]]  # of shared prefixes: first request, requests, shared tokens
MAX_GROUPS = 4


def share_prefixes(cache: Tensor, batch: ops.AttnBatch, groups: Groups) -> ops.AttnBatch:
    """``batch`` with requests that share prefixes; the slots that they had instead are NaN."""
    rows = batch.b_req_idx.long()
    for first, count, shared in groups:
        table = batch.req_to_token
        cache[table[rows[first + 1 : first + count], :shared].long()] = NAN
        table[rows[first + 1 : first + count], :shared] = table[rows[first], :shared]
    listed = [[*group, 0] for group in groups] + [[0] * 4] * (MAX_GROUPS - len(groups))
    return replace(batch, shared_prefixes=torch.tensor(listed, dtype=torch.int32, device=cache.device))


def context_attention_args(
    lens: list[tuple[int, int]], heads: tuple[int, int], dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, ops.AttnBatch, ops.AttnOptions]:
    """As attention_args, with the keys and values of the step's own tokens beside its queries."""
    q, cache, batch, options = attention_args(lens, heads, dim, dtype, device)
    fused = torch.cat((q, q.new_empty(len(q), cache.shape[1], dim)), dim=1)
    kv = fused[:, q.shape[1] :]
    row = 0
    for req_idx, (ready, new) in zip(batch.b_req_idx.tolist(), lens, strict=True):
        kv[row : row + new] = cache[batch.req_to_token[req_idx, ready : ready + new].long()]
        row += new
    return fused[:, : q.shape[1]], kv, cache, batch, options


LatentShape = tuple[int, int, int, int, int]  # heads, nope, rope, value, rank
SMALL_LATENT: LatentShape = (4, 32, 16, 48, 64)


def latent_args(
    lens: list[tuple[int, int]], shape: LatentShape, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, ops.AttnBatch, ops.AttnOptions]:
    """Arguments of latent_token_attention, as in attention_args."""
    heads, nope, rope, value, rank = shape
    cached, cache, batch, _ = attention_args(lens, (1, 1), rank + rope, dtype, device)
    wide_q = torch.full((len(cached), heads * (nope + rope) + 8), NAN, dtype=dtype, device=device)
    q = wide_q[:, 8:].view(len(cached), heads, nope + rope)
    q.copy_(randn(*q.shape, dtype=dtype, device=device, seed=3))
    kv_b = randn(heads, nope + value, rank, device=device, seed=4) * rank**-0.5
    return q, cache[:, :1], kv_b.to(dtype), batch, ops.AttnOptions((nope + rope) ** -0.5)


def latent_context_args(
    lens: list[tuple[int, int]], shape: LatentShape, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, ops.AttnBatch, ops.AttnOptions]:
    """As latent_args, with the latents of the step's own tokens in a part of a wider tensor."""
    q, cache, kv_b, batch, options = latent_args(lens, shape, dtype, device)
    latent = torch.full((len(q), cache.shape[2] + 8), NAN, dtype=dtype, device=device)[:, :-8]
    row = 0
    for req_idx, (ready, new) in zip(batch.b_req_idx.tolist(), lens, strict=True):
        latent[row : row + new] = cache[batch.req_to_token[req_idx, ready : ready + new].long(), 0]
        row += new
    return q, latent, cache, kv_b, batch, options


def selection_args(
    lens: list[tuple[int, int]], shape: tuple[int, int], dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, ops.AttnBatch, int]:
    """Arguments of select_tokens, as in attention_args. ``shape``: heads, and numbers of each."""
    q, cache, batch, _ = attention_args(lens, (shape[0], 1), shape[1], dtype, device)
    weights = torch.full((len(q), shape[0] + 3), NAN, device=device)[:, :-3]
    weights.copy_(randn(*weights.shape, device=device, seed=5))
    return q, weights, cache[:, :1], batch, 4


def penalties_of(entries: list[tuple[int, int, int]], shape: tuple[int, int], device: str) -> ops.Penalties:
    """Penalties of every row of logits of this shape; ``entries``: (row, token, count in the output).

    A token of an odd id is in the prompt too, one that the output lacks is in the prompt alone. What requests saw is in
    another order than the rows of the logits, between rows of a request that saw everything.
    """
    batch, vocab = shape
    seen = torch.full((2 * batch + 1, vocab), 3, dtype=torch.int32, device=device)
    seen_rows = [2 * (batch - row) - 1 for row in range(batch)]
    seen[seen_rows] = 0
    for row, token, count in entries:
        seen[seen_rows[row], token] = 2 * count + (token % 2 or count == 0)
    return ops.Penalties(
        rows=ints(list(range(batch)), device),
        b_repetition=torch.linspace(1.0, 1.5, batch, device=device),
        b_presence=torch.linspace(0.3, 0.0, batch, device=device),
        b_frequency=torch.linspace(-0.1, 0.2, batch, device=device),
        b_seen_row=ints(seen_rows, device),
        seen=seen,
    )
