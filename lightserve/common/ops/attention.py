"""Attention over the token-granular KV cache.

``kv_cache`` is ``[slots, 2 * kv_heads, dim]``, the heads of the keys first, or 8-bit codes of it with their scales. A
token may be in any slot; ``AttnBatch.req_to_token`` says in which.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightserve.common.ops.kv_cache import KvCache, QuantizedKv, read_kv
from lightserve.common.ops.registry import op

# A backend reads whole blocks of keys, so it may read the KV of so many tokens before a window. They have weight 0, but
# their values must be finite. It never reads those before them: their slots may hold anything.
WINDOW_MARGIN = 64


@dataclass(frozen=True, slots=True)
class AttnBatch:
    """Where the tokens of a batch are: among the query rows and in the cache."""

    req_to_token: Tensor  # [rows, max_len] int32: cache slot of every token of every request
    b_req_idx: Tensor  # [batch] int32: the request's row in req_to_token
    b_start_loc: Tensor  # [batch] int32: the request's first query row
    b_seq_len: Tensor  # [batch] int32: tokens in the cache, this step's included
    b_ready_cache_len: Tensor  # [batch] int32: tokens in the cache before this step
    # Some requests have exactly one query row; a backend may compute those of a context step by token attention.
    has_decodes: bool = False
    # [groups, 4] int32: groups of neighbouring requests with one query row each, which begin with the same slots. The
    # columns are the first request, the number of requests (0: no group) and the number of shared tokens; the last one
    # is unused. A hint: a backend may read the shared prefix once for all; only rounding changes.
    shared_prefixes: Tensor | None = None
    # [tokens] int32: the position of the last key that each query row of a causal layer sees, if that is not its own:
    # tokens of an image may see all of it. None: no row sees a later key. A request with one query row sees none.
    see_until: Tensor | None = None
    # [batch] int32: in layers that are not causal, how many tokens of each request are keys; None: all of them. The
    # others, which expand a query, see them and are not seen. A row that sees no key gets zeros.
    b_num_keys: Tensor | None = None
    # What a backend derives once for all layers of a step that are alike. The key is all that it depends on.
    plans: dict[Hashable, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class AttnOptions:
    """How a layer computes its scores, and which keys its queries see. A backend refuses what it does not implement."""

    scale: float  # of the scores before anything is added to them
    alibi_slopes: Tensor | None = None  # [heads] float32: adds slope * (key position - query position) to the scores
    causal: bool = True  # a query sees no key past its own position
    window: int | None = None  # keys that a query sees, its own included; not causal: on each side; None: all
    softcap: float | None = None  # scores become softcap * tanh(score / softcap); None: they stay
    sinks: Tensor | None = None  # [heads] float32: the score of a key without a value in each softmax

    def is_seen(self, distance: Tensor, ahead: Tensor | int = 0) -> Tensor:
        """Whether a query sees a key; ``distance`` is the position of the key minus that of the query.

        ``ahead``: how many later keys a causal query sees, see ``AttnBatch.see_until``.
        """
        seen = distance <= ahead if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is None:
            return seen
        return seen & ((distance > -self.window) if self.causal else (distance.abs() < self.window))

    def first_seen(self, position: int) -> int:
        """The first key that the query at ``position`` sees."""
        return 0 if self.window is None else max(position - self.window + 1, 0)

    @property
    def key(self) -> Hashable:
        """The part of the options that a plan depends on. It lacks values that kernels only read or multiply by."""
        return self.alibi_slopes is not None, self.causal, self.window, self.softcap is not None, self.sinks is not None

    def check_supported(self, backend: str, *implemented: str) -> None:
        """Raise if an option is set that is not among ``implemented``; ``scale`` always is."""
        for name, default in OPTION_DEFAULTS.items():
            value = getattr(self, name)
            if value is not default and name not in implemented:
                known = ", ".join(("scale", *implemented))
                raise NotImplementedError(
                    f"the backend {backend} does not implement the attention option {name}={value!r}; it has {known}"
                )


OPTION_DEFAULTS: dict[str, object] = {
    "alibi_slopes": None,
    "causal": True,
    "window": None,
    "softcap": None,
    "sinks": None,
}


@op
def write_kv(kv: Tensor, slots: Tensor, kv_cache: KvCache) -> None:
    """Store ``[tokens, 2 * kv_heads, dim]`` in the cache, one slot for each token."""
    if isinstance(kv_cache, QuantizedKv):
        kv_cache.write(kv, slots.long())
    else:
        kv_cache[slots.long()] = kv.to(kv_cache.dtype)


@op
def context_attention(q: Tensor, kv: Tensor, kv_cache: KvCache, batch: AttnBatch, options: AttnOptions) -> Tensor:
    """Attention of ``q`` ``[tokens, heads, dim]``: the last rows of each request over its cached tokens.

    ``kv`` ``[tokens, 2 * kv_heads, dim]`` holds the keys and values of this step's tokens, which the cache holds too: a
    backend may read either. If the cache is quantised, results depend on which one it reads; a batch-invariant backend
    reads the cache, so that chunks of a prompt do not change its result.
    """
    return _attend(q, kv_cache, batch, options)


@op
def token_attention(q: Tensor, kv_cache: KvCache, batch: AttnBatch, options: AttnOptions) -> Tensor:
    """Attention of a decode step: row i of ``q`` is the only query row of request i."""
    return _attend(q, kv_cache, batch, options)


def _attend(q: Tensor, kv_cache: KvCache, batch: AttnBatch, options: AttnOptions) -> Tensor:
    out = torch.empty_like(q)
    num_keys = batch.b_seq_len if batch.b_num_keys is None or options.causal else batch.b_num_keys
    columns = (batch.b_req_idx, batch.b_start_loc, batch.b_seq_len, batch.b_ready_cache_len, num_keys)
    for req, start, seq_len, ready, end in zip(*(column.tolist() for column in columns), strict=True):
        rows = slice(start, start + seq_len - ready)
        first = options.first_seen(ready)
        kv = read_kv(kv_cache, batch.req_to_token[req, first:end].long(), torch.float32)
        k, v = kv.repeat_interleave(2 * q.shape[1] // kv.shape[1], dim=1).chunk(2, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k)
        keys, queries = torch.arange(first, end, device=q.device), torch.arange(ready, seq_len, device=q.device)
        distance = keys - queries[:, None]
        ahead = 0 if batch.see_until is None else batch.see_until[rows, None] - queries[:, None]
        weights = attention_weights(scores, distance, options, ahead)
        out[rows] = torch.einsum("hqk,khd->qhd", weights if end == seq_len else weights.nan_to_num(0.0), v).to(q.dtype)
    return out


def attention_weights(scores: Tensor, distance: Tensor, options: AttnOptions, ahead: Tensor | int = 0) -> Tensor:
    """The softmax of the products ``[..., heads, rows, keys]`` of queries and keys, after all that ``options`` say.

    ``distance`` ``[rows, keys]``: the position of each key minus that of the query; ``ahead``: see ``is_seen``.
    """
    scores = scores * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi_slopes is not None:
        scores = scores + options.alibi_slopes[:, None, None] * distance
    scores = scores.masked_fill(~options.is_seen(distance, ahead), float("-inf"))
    if options.sinks is None:
        return scores.softmax(-1)
    sinks = options.sinks[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
