"""Attention through torch's fused CPU kernel over gathered K and V.

Decode rows are batched: requests of similar length are padded to one length, and the query heads that share a KV head
become the rows of one query, so K and V are neither repeated nor read twice. Prompts are computed one by one. A request
whose slots are neighbours, as in a single stream, is read in place. Torch's kernel knows neither a softcap nor sinks:
their layers compute the scores first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common import ops
from lightserve.common.ops import AttnBatch, AttnOptions, KvCache, QuantizedKv

MASKED_ROWS = 256  # of a prompt at a time: the mask of a whole prompt takes heads * length^2 numbers
# gathered tokens over real tokens of a group; 32 requests of one length are 1.9x faster together than one by one
MAX_PADDING = 1.25


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests with one query row each, padded to one length."""

    rows: Tensor  # [group] their query rows
    slots: Tensor | slice  # [group * length] cache slots, the first one of a request repeated as padding
    mask: Tensor | None  # [group, 1, 1, length] 0 or -inf, if there is padding
    distance: Tensor  # [group, 1, 1, length] key position - query position


class _Single(NamedTuple):
    """A request with one query row."""

    length: int  # keys that it sees
    row: int
    req_idx: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class _Prompt:
    rows: slice
    slots: Tensor | slice  # [seq_len]
    ready_len: int  # tokens in the cache before this step
    ahead: Tensor | None = None  # [rows, 1] later keys that each row of a causal layer sees, if any sees some
    num_keys: int | None = None  # of a layer that is not causal; None: all tokens

    def ahead_of(self, begin: int) -> Tensor | None:
        return None if self.ahead is None else self.ahead[begin : begin + MASKED_ROWS]


@ops.context_attention.impl("cpu")
def context_attention(q: Tensor, kv: Tensor, kv_cache: KvCache, batch: AttnBatch, options: AttnOptions) -> Tensor:
    return _attend(q, kv_cache, batch, options)


@ops.token_attention.impl("cpu")
def token_attention(q: Tensor, kv_cache: KvCache, batch: AttnBatch, options: AttnOptions) -> Tensor:
    groups, _ = _plan(batch, options)
    if len(groups) == 1:
        return _attend_group(q, kv_cache, groups[0], options)
    return _attend(q, kv_cache, batch, options)


def _attend(q: Tensor, kv_cache: KvCache, batch: AttnBatch, options: AttnOptions) -> Tensor:
    groups, prompts = _plan(batch, options)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in groups:
        out[group.rows] = _attend_group(q[group.rows], kv_cache, group, options)
    for prompt in prompts:
        out[prompt.rows] = _attend_prompt(q[prompt.rows], kv_cache, prompt, options)
    return out


def _attend_group(q: Tensor, kv_cache: KvCache, group: _Group, options: AttnOptions) -> Tensor:
    count, heads, dim = q.shape
    kv_heads = kv_cache.shape[1] // 2
    kv = _read(kv_cache, group.slots, q.dtype).view(count, -1, 2 * kv_heads, dim).transpose(1, 2)
    mask = group.mask
    if options.alibi_slopes is not None:
        alibi = options.alibi_slopes.view(1, kv_heads, -1, 1) * group.distance
        mask = alibi if mask is None else alibi + mask
    if mask is not None:
        mask = mask.to(q.dtype)
    packed = q.reshape(count, kv_heads, heads // kv_heads, dim)
    if options.softcap is None and options.sinks is None:
        out = F.scaled_dot_product_attention(
            packed, kv[:, :kv_heads], kv[:, kv_heads:], attn_mask=mask, scale=options.scale
        )
    else:
        out = _attend_by_scores(packed, kv[:, :kv_heads], kv[:, kv_heads:], mask, options)
    return out.reshape(count, heads, dim)


def _attend_by_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: AttnOptions) -> Tensor:
    """Attention of ``q`` ``[requests, kv_heads, rows, dim]``; the heads that share a kv head follow each other in rows.

    ``mask`` is added to the scores.
    """
    scores = q.float() @ k.float().mT * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if mask is not None:
        scores = scores + mask
    if options.sinks is None:
        return (scores.softmax(-1) @ v.float()).to(q.dtype)
    rows = scores.shape[2] * scores.shape[1] // len(options.sinks)  # of each head
    sinks = options.sinks.repeat_interleave(rows).view(1, *scores.shape[1:3], 1).expand(len(scores), -1, -1, 1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    return (weights @ v.float()).to(q.dtype)


def _attend_prompt(q: Tensor, kv_cache: KvCache, prompt: _Prompt, options: AttnOptions) -> Tensor:
    kv_heads, length = kv_cache.shape[1] // 2, prompt.ready_len + len(q)
    kv = _read(kv_cache, prompt.slots, q.dtype).transpose(0, 1)[None]
    if not options.causal:
        kv = kv[:, :, : prompt.num_keys]
    k, v = kv[:, :kv_heads], kv[:, kv_heads:]
    q = q.transpose(0, 1)[None]
    is_plain = options.alibi_slopes is None and options.softcap is None and options.sinks is None
    sees_all = (prompt.ready_len == 0 and prompt.ahead is None) or not options.causal
    if is_plain and sees_all and not _clips(options, length):
        attend = partial(F.scaled_dot_product_attention, scale=options.scale, enable_gqa=True)
        return attend(q, k, v, is_causal=options.causal)[0].transpose(0, 1)
    outs = [
        _attend_rows(
            q[:, :, begin : begin + MASKED_ROWS], k, v, prompt.ready_len + begin, options, prompt.ahead_of(begin)
        )
        for begin in range(0, q.shape[2], MASKED_ROWS)
    ]
    out = torch.cat(outs, dim=2)[0].transpose(0, 1)
    return out if k.shape[2] == length else out.nan_to_num_(0.0)


def _clips(options: AttnOptions, length: int) -> bool:
    """Whether the window hides keys of a request of this length."""
    return options.window is not None and options.window < length


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, position: int, options: AttnOptions, ahead: Tensor | None) -> Tensor:
    """Attention of rows ``[1, heads, rows, dim]`` of a prompt from ``position`` on, over the keys that any row sees."""
    rows, window = q.shape[2], options.window
    first = min(options.first_seen(position), k.shape[2])
    end = position + rows if options.causal and ahead is None else k.shape[2]
    if not options.causal and window is not None:
        end = min(end, position + rows + window - 1)
    distance = torch.arange(first, end) - torch.arange(position, position + rows)[:, None]
    k, v = k[:, :, first:end], v[:, :, first:end]
    mask = torch.zeros(distance.shape)
    if options.alibi_slopes is not None:
        mask = options.alibi_slopes[:, None, None] * distance
    mask = mask.masked_fill(~options.is_seen(distance, 0 if ahead is None else ahead), float("-inf")).to(q.dtype)
    if options.softcap is None and options.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.scale, enable_gqa=True)
    group = q.shape[1] // k.shape[1]
    mask = mask.expand(q.shape[1], rows, -1).reshape(1, k.shape[1], group * rows, -1)
    packed = q.reshape(1, k.shape[1], group * rows, -1)
    return _attend_by_scores(packed, k, v, mask, options).view(q.shape)


def _read(kv_cache: KvCache, slots: Tensor | slice, dtype: torch.dtype) -> Tensor:
    if isinstance(kv_cache, QuantizedKv):
        return kv_cache.read(slots, dtype)
    return kv_cache[slots] if isinstance(slots, slice) else kv_cache.index_select(0, slots)


def _as_run(slots: Tensor) -> Tensor | slice:
    """The slots as a slice if they are neighbours."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first + 1 == len(slots) and bool((slots[1:] - slots[:-1] == 1).all()):
        return slice(first, last + 1)
    return slots


def _plan(batch: AttnBatch, options: AttnOptions) -> tuple[list[_Group], list[_Prompt]]:
    """What the layers of a step share. The first one derives it."""
    key = ("cpu", options.key)
    plan = batch.plans.get(key)
    if plan is None:
        options.check_supported("cpu", "alibi_slopes", "causal", "window", "softcap", "sinks")
        plan = batch.plans[key] = _make_plan(batch, options.window)
    return plan


def _make_plan(batch: AttnBatch, window: int | None) -> tuple[list[_Group], list[_Prompt]]:
    fields = (batch.b_req_idx, batch.b_start_loc, batch.b_seq_len, batch.b_ready_cache_len)
    reqs = list(zip(*(field.tolist() for field in fields), strict=True))
    num_keys = [None] * len(reqs) if batch.b_num_keys is None else batch.b_num_keys.tolist()
    prompts = []
    singles = []
    for (req_idx, start, seq_len, ready), seen in zip(reqs, num_keys, strict=True):
        if seq_len == ready:
            continue
        if seq_len - ready == 1:
            singles.append(_Single(seq_len if window is None else min(window, seq_len), start, req_idx, seq_len))
            continue
        slots = _as_run(batch.req_to_token[req_idx, :seq_len].long())
        rows = slice(start, start + seq_len - ready)
        prompts.append(_Prompt(rows, slots, ready, _ahead(batch, rows, ready), seen))
    return [_make_group(batch, members) for members in _alike(singles)], prompts


def _ahead(batch: AttnBatch, rows: slice, ready_len: int) -> Tensor | None:
    """See ``_Prompt.ahead``."""
    if batch.see_until is None:
        return None
    ahead = batch.see_until[rows] - torch.arange(ready_len, ready_len + rows.stop - rows.start)
    return ahead[:, None] if bool(ahead.any()) else None


def _alike(singles: list[_Single]) -> list[list[_Single]]:
    """Group requests by similar length; one group, in row order, if that pads little."""
    if not singles:
        return []
    longest, total = max(single.length for single in singles), sum(single.length for single in singles)
    if longest * len(singles) <= MAX_PADDING * total:
        return [singles]
    runs: list[list[_Single]] = []
    for single in sorted(singles):
        if runs and single.length <= MAX_PADDING * runs[-1][0].length:
            runs[-1].append(single)
        else:
            runs.append([single])
    return runs


def _make_group(batch: AttnBatch, members: Sequence[_Single]) -> _Group:
    lens, rows, req_idx, seq_lens = (torch.tensor(column) for column in zip(*members, strict=True))
    positions = torch.arange(int(lens.max()))
    is_real = positions < lens[:, None]
    seen = torch.where(is_real, positions, 0) + (seq_lens - lens)[:, None]
    slots = batch.req_to_token[req_idx[:, None], seen].flatten().long()
    mask = None
    if not is_real.all():
        mask = torch.zeros(is_real.shape).masked_fill_(~is_real, float("-inf"))[:, None, None]
    distance = (positions - (lens[:, None] - 1))[:, None, None]
    return _Group(rows, _as_run(slots), mask, distance)
