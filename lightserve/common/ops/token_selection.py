"""Sparse attention: small keys, apart from those of the attention, decide which tokens a query attends to.

``key_cache`` is ``[slots, 1, dim]``. The result has cache slots, so it can be the table of an ``AttnBatch`` in which
each query is a request of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.common.ops.attention import AttnBatch
from lightserve.common.ops.registry import op


@op
def select_tokens(q: Tensor, weights: Tensor, key_cache: Tensor, batch: AttnBatch, top_k: int) -> Tensor:
    """The cache slots of the ``top_k`` tokens with the highest scores for each query: ``[tokens, top_k]`` int32.

    The score of a token is the sum over heads of ``weights`` ``[tokens, heads]``, in float32, times the positive part
    of the product of ``q`` ``[tokens, heads, dim]`` and its key. A query sees the tokens up to its own. The slots are
    in the order of the tokens; of equal scores the first tokens count. Where a query sees fewer tokens than ``top_k``,
    their slots come first, and the others mean nothing.
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
