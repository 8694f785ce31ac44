"""Matmul and attention whose result for a row does not depend on the rows beside it.

The order of sums in torch's kernels depends on the shapes, so they always get the same shapes here. Rows are multiplied
in blocks of one size; the last block is padded. A query is computed together with its block of positions, whether those
are new in this step or not, over the keys up to the end of that block.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common import ops
from lightserve.common.cpu_kernel.token_selection import select
from lightserve.common.ops import AttnBatch, AttnOptions, KvCache, attention_weights, read_kv
from lightserve.common.ops.kv_cache import LatentCache, read_latents
from lightserve.common.ops.latent_attention import latent_sizes

BACKEND = ops.batch_invariant("cpu")
ROWS = 32  # of a block: 256 rows take 1.4 to 2.5 times as long as in one product, in blocks of 8 up to 10 times
POSITIONS = 8  # of a block of queries: a decode computes 8 and needs one


@ops.linear_float32.impl(BACKEND)
def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    return linear(x.float(), weight.float())


@ops.linear.impl(BACKEND)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows, weight = x.reshape(-1, x.shape[-1]), weight.to(x.dtype)
    out = x.new_empty((len(rows), len(weight)))
    for begin in range(0, len(rows), ROWS):
        block = rows[begin : begin + ROWS]
        out[begin : begin + ROWS] = F.linear(_padded(block, ROWS), weight, bias)[: len(block)]
    return out.view(*x.shape[:-1], len(weight))


@ops.context_attention.impl(BACKEND)
def context_attention(q: Tensor, kv: Tensor, kv_cache: KvCache, batch: AttnBatch, options: AttnOptions) -> Tensor:
    return token_attention(q, kv_cache, batch, options)


@ops.token_attention.impl(BACKEND)
def token_attention(q: Tensor, kv_cache: KvCache, batch: AttnBatch, options: AttnOptions) -> Tensor:
    options.check_supported(BACKEND, "alibi_slopes", "window", "softcap", "sinks")
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    columns = (batch.b_req_idx, batch.b_start_loc, batch.b_seq_len, batch.b_ready_cache_len)
    for req, start, seq_len, ready in zip(*(column.tolist() for column in columns), strict=True):
        keys = read_kv(kv_cache, batch.req_to_token[req, :seq_len].long(), torch.float32)
        kv = _padded(keys, -(-seq_len // POSITIONS) * POSITIONS)
        kv[: options.first_seen(ready)] = 0  # the slots of these tokens may hold anything
        row = start - ready  # where position 0 would be if it were new
        for first in range(ready // POSITIONS * POSITIONS, seq_len, POSITIONS):
            end = first + POSITIONS
            begin, stop = max(first, ready), min(end, seq_len)
            queries = q.new_zeros(POSITIONS, *q.shape[1:], dtype=torch.float32)
            queries[begin - first : stop - first] = q[row + begin : row + stop]
            ahead = _ahead(batch, row, slice(begin, stop), first)
            last_seen = first + int((torch.arange(POSITIONS) + ahead[:, 0]).max())
            attended = _attend(queries, kv[: -(-(last_seen + 1) // POSITIONS) * POSITIONS], first, options, ahead)
            out[row + begin : row + stop] = attended[begin - first : stop - first]
    return out


@ops.latent_context_attention.impl(BACKEND)
def latent_context_attention(
    q: Tensor, latent: Tensor, latent_cache: LatentCache, kv_b: Tensor, batch: AttnBatch, options: AttnOptions
) -> Tensor:
    return latent_token_attention(q, latent_cache, kv_b, batch, options)


@ops.latent_token_attention.impl(BACKEND)
def latent_token_attention(
    q: Tensor, latent_cache: LatentCache, kv_b: Tensor, batch: AttnBatch, options: AttnOptions
) -> Tensor:
    """Plain attention over keys and values that are expanded to one size, padded with columns of 0."""
    options.check_supported(BACKEND)
    sizes = latent_sizes(q, latent_cache, kv_b)
    slots, by_token = used_slots(batch)
    latents = read_latents(latent_cache, slots, q.dtype)
    kv = linear(latents[:, : sizes.rank], kv_b.flatten(0, 1)).view(len(latents), *kv_b.shape[:2])
    width = max(q.shape[2], sizes.value)
    expanded = q.new_zeros(len(slots), 2 * sizes.heads, width)
    expanded[:, : sizes.heads, : sizes.nope] = kv[..., : sizes.nope]
    expanded[:, : sizes.heads, sizes.nope : q.shape[2]] = latents[:, None, sizes.rank :]
    expanded[:, sizes.heads :, : sizes.value] = kv[..., sizes.nope :]
    padded_q = F.pad(q, (0, width - q.shape[2]))
    return token_attention(padded_q, expanded, by_token, options)[..., : sizes.value].contiguous()


@ops.select_tokens.impl(BACKEND)
def select_tokens(q: Tensor, weights: Tensor, key_cache: Tensor, batch: AttnBatch, top_k: int) -> Tensor:
    """Row by row: the shapes of the products depend on the position alone."""
    return select(q, weights, key_cache, batch, top_k, 1)


def used_slots(batch: AttnBatch) -> tuple[Tensor, AttnBatch]:
    """The slots of all tokens of the batch, one request behind the other, and the batch with their numbers as slots."""
    table = torch.zeros(len(batch.b_req_idx), batch.req_to_token.shape[1], dtype=torch.int32)
    slots = [torch.empty(0, dtype=torch.int64)]
    first = 0
    for row, (req, seq_len) in enumerate(zip(batch.b_req_idx.tolist(), batch.b_seq_len.tolist(), strict=True)):
        slots.append(batch.req_to_token[req, :seq_len].long())
        table[row, :seq_len] = torch.arange(first, first + seq_len)
        first += seq_len
    by_token = replace(batch, req_to_token=table, b_req_idx=torch.arange(len(table), dtype=torch.int32), plans={})
    return torch.cat(slots), by_token


def _ahead(batch: AttnBatch, row: int, positions: slice, first: int) -> Tensor:
    """How many later keys each position of the block from ``first`` on sees: ``[POSITIONS, 1]``.

    ``positions`` of it are new; ``row`` would have position 0.
    """
    ahead = torch.zeros(POSITIONS, dtype=torch.int64)
    if batch.see_until is not None:
        begin, stop = positions.start, positions.stop
        seen = batch.see_until[row + begin : row + stop]
        ahead[begin - first : stop - first] = seen - torch.arange(begin, stop)
    return ahead[:, None]


def _attend(q: Tensor, kv: Tensor, position: int, options: AttnOptions, ahead: Tensor) -> Tensor:
    """Causal attention of the rows ``q`` from ``position`` on over all positions ``kv``. ``ahead``: see ``is_seen``."""
    (rows, heads, dim), (length, both_heads, _) = q.shape, kv.shape
    kv_heads = both_heads // 2
    k, v = kv.transpose(0, 1).chunk(2)
    packed = q.view(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = (packed @ k.transpose(1, 2)).view(heads, rows, length)
    distance = torch.arange(length) - torch.arange(position, position + rows)[:, None]
    weights = attention_weights(scores, distance, options, ahead)
    return (weights.view(kv_heads, -1, length) @ v).view(heads, rows, dim).transpose(0, 1)


def _padded(x: Tensor, rows: int) -> Tensor:
    """``x`` padded with rows of 0 to ``rows``. Always a copy, so that the alignment of its address is the same."""
    out = x.new_zeros(rows, *x.shape[1:])
    out[: len(x)] = x
    return out
