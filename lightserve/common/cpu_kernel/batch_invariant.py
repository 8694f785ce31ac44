"""Matmul and attention whose result for a row does not depend on the rows beside it.

The order of sums in torch's kernels depends on the shapes, so they always get the same shapes here. Rows are multiplied
in blocks of one size; the last block is padded. A query is computed together with its block of positions, whether those
are new in this step or not, over the keys up to the end of that block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common import ops
from lightserve.common.ops import AttnBatch, AttnOptions, attention_weights

BACKEND = ops.batch_invariant("cpu")
ROWS = 32  # of a block: 256 rows take 1.4 to 2.5 times as long as in one product, in blocks of 8 up to 10 times
POSITIONS = 8  # of a block of queries: a decode computes 8 and needs one


@ops.linear.impl(BACKEND)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty((len(rows), len(weight)))
    for begin in range(0, len(rows), ROWS):
        block = rows[begin : begin + ROWS]
        out[begin : begin + ROWS] = F.linear(_padded(block, ROWS), weight, bias)[: len(block)]
    return out.view(*x.shape[:-1], len(weight))


@ops.context_attention.impl(BACKEND)
def context_attention(q: Tensor, kv: Tensor, kv_cache: Tensor, batch: AttnBatch, options: AttnOptions) -> Tensor:
    return token_attention(q, kv_cache, batch, options)


@ops.token_attention.impl(BACKEND)
def token_attention(q: Tensor, kv_cache: Tensor, batch: AttnBatch, options: AttnOptions) -> Tensor:
    options.check_supported(BACKEND, "alibi_slopes", "window", "softcap", "sinks")
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    columns = (batch.b_req_idx, batch.b_start_loc, batch.b_seq_len, batch.b_ready_cache_len)
    for req, start, seq_len, ready in zip(*(column.tolist() for column in columns), strict=True):
        kv = _padded(kv_cache[batch.req_to_token[req, :seq_len].long()].float(), -(-seq_len // POSITIONS) * POSITIONS)
        row = start - ready  # where position 0 would be if it were new
        for first in range(ready // POSITIONS * POSITIONS, seq_len, POSITIONS):
            end = first + POSITIONS
            begin, stop = max(first, ready), min(end, seq_len)
            queries = q.new_zeros(POSITIONS, *q.shape[1:], dtype=torch.float32)
            queries[begin - first : stop - first] = q[row + begin : row + stop]
            attended = _attend(queries, kv[:end], options)
            out[row + begin : row + stop] = attended[begin - first : stop - first]
    return out


def _attend(q: Tensor, kv: Tensor, options: AttnOptions) -> Tensor:
    """Causal attention of the last positions ``q`` over all positions ``kv``."""
    (rows, heads, dim), (length, both_heads, _) = q.shape, kv.shape
    kv_heads = both_heads // 2
    k, v = kv.transpose(0, 1).chunk(2)
    packed = q.view(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = (packed @ k.transpose(1, 2)).view(heads, rows, length)
    distance = torch.arange(length) - torch.arange(length - rows, length)[:, None]
    weights = attention_weights(scores, distance, options)
    return (weights.view(kv_heads, -1, length) @ v).view(heads, rows, dim).transpose(0, 1)


def _padded(x: Tensor, rows: int) -> Tensor:
    """``x`` padded with rows of 0 to ``rows``. Always a copy, so that the alignment of its address is the same."""
    out = x.new_zeros(rows, *x.shape[1:])
    out[: len(x)] = x
    return out
