"""The choice of tokens by torch, for some rows of a prompt at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops import AttnBatch, best_tokens

ROWS_AT_ONCE = 32  # of a prompt: products take heads * length numbers for each


@ops.select_tokens.impl("cpu")
def select_tokens(q: Tensor, weights: Tensor, key_cache: Tensor, batch: AttnBatch, top_k: int) -> Tensor:
    return select(q, weights, key_cache, batch, top_k, ROWS_AT_ONCE)


def select(q: Tensor, weights: Tensor, key_cache: Tensor, batch: AttnBatch, top_k: int, rows_at_once: int) -> Tensor:
    """Like the op. The scores of several rows are one product, over the tokens that the last of these rows sees."""
    slots = batch.req_to_token.new_zeros(len(q), top_k)
    columns = (batch.b_req_idx, batch.b_start_loc, batch.b_seq_len, batch.b_ready_cache_len)
    for req, start, seq_len, ready in zip(*(column.tolist() for column in columns), strict=True):
        table = batch.req_to_token[req, :seq_len]
        first = min(max(ready, top_k), seq_len)  # rows before it see all that there is
        slots[start : start + first - ready, : min(top_k, seq_len)] = table[:top_k]
        keys = key_cache[:, 0].index_select(0, table.long()).float() if first < seq_len else None
        for begin in range(first, seq_len, rows_at_once):
            assert keys is not None
            end = min(begin + rows_at_once, seq_len)
            rows = slice(start + begin - ready, start + end - ready)
            products = (q[rows].float().flatten(0, 1) @ keys[:end].T).relu_().view(end - begin, q.shape[1], end)
            scores = torch.bmm(weights[rows, None], products)[:, 0]
            is_seen = torch.arange(end) <= torch.arange(begin, end)[:, None]
            slots[rows] = table[best_tokens(scores.masked_fill_(~is_seen, float("-inf")), top_k)]
    return slots
