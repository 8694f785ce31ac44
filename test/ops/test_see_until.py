"""Rows that see later keys: the tokens of an image that see all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from test.ops.cases import assert_close, context_attention_args, device_of, each_backend, wide

HEADS, DIM = (6, 2), 64
# (tokens in the cache, new tokens), and the spans whose tokens see one another: the first, and the one after the last
STEP: list[tuple[tuple[int, int], list[tuple[int, int]]]] = [
    ((0, 1), []),
    ((0, 37), [(5, 30)]),
    ((5, 1), []),
    ((70, 13), [(60, 75), (75, 80)]),  # the first one is cached in part
    ((50, 90), [(51, 60), (65, 140)]),
]
WINDOWS = [None, 30]


def see_until(device: str) -> Tensor:
    """Padding after the last request sees itself."""
    columns = []
    for (ready, count), spans in STEP:
        last = torch.arange(ready, ready + count)
        for begin, end in spans:
            last[(last >= begin) & (last < end)] = end - 1
        columns.append(last)
    return torch.cat(columns).int().to(device)


def step_of(device: str, window: int | None) -> tuple[Tensor, Tensor, Tensor, ops.AttnBatch, ops.AttnOptions]:
    lens = [length for length, _ in STEP]
    q, kv, cache, batch, options = context_attention_args(lens, HEADS, DIM, torch.float32, device)
    return q, kv, cache, replace(batch, see_until=see_until(device)), replace(options, window=window)


@each_backend(ops.context_attention)
@pytest.mark.parametrize("window", WINDOWS)
def test_tokens_of_a_span_see_all_of_it_in_every_backend(backend: str, window: int | None) -> None:
    q, kv, cache, batch, options = step_of(device_of(backend), window)
    expected = ops.context_attention(wide(q), wide(kv), wide(cache), batch, options)

    for has_decodes in (False, True):
        step = replace(batch, has_decodes=has_decodes, plans={})
        assert_close(ops.context_attention.impls[backend](q, kv, cache, step, options), expected, torch.float32)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_row_sees_the_keys_of_its_window_and_of_its_span(window: int | None) -> None:
    q, kv, cache, batch, options = step_of("cpu", window)
    out = ops.context_attention(q, kv, cache, batch, options)
    begin = 0
    for row, ((ready, count), spans) in enumerate(STEP):
        keys, queries = torch.arange(ready + count), torch.arange(ready, ready + count)[:, None]
        is_seen = keys <= queries
        for first, end in spans:
            is_seen |= (keys >= first) & (keys < end) & (queries >= first) & (queries < end)
        if window is not None:
            is_seen &= keys > queries - window
        slots = batch.req_to_token[batch.b_req_idx[row], : ready + count].long()
        k, v = cache[slots].transpose(0, 1).repeat_interleave(HEADS[0] // HEADS[1], dim=0).chunk(2)
        rows = slice(begin, begin + count)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[rows].transpose(0, 1), k, v, attn_mask=is_seen, scale=options.scale
        )

        torch.testing.assert_close(out[rows], expected.transpose(0, 1))
        begin += count


def test_a_step_without_spans_is_causal() -> None:
    q, kv, cache, batch, options = step_of("cpu", None)
    seen = ops.context_attention(q, kv, cache, batch, options)

    causal = ops.context_attention(q, kv, cache, replace(batch, see_until=None), options)

    assert (seen - causal).abs().max() > 0.1
