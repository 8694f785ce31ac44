"""The options of attention, each alone and together, in every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel.attention._context_tiles import TILINGS
from test.ops.cases import (
    alibi_slopes,
    assert_close,
    attention_args,
    context_attention_args,
    device_of,
    each_backend,
    each_backend_and_dtype,
    randn,
    share_prefixes,
    wide,
)

HEADS, DIM = (6, 2), 64
DECODE = [(length - 1, 1) for length in (1, 7, 8, 129, 400)]
CONTEXT = [(0, 1), (0, 37), (5, 1), (70, 13), (200, 1), (140, 70)]
WINDOWS = [1, 7, 65, 4096]
SCORE_OPTIONS = ["softcap", "sinks", "softcap, sinks, window and alibi"]


def options_of(name: str, base: ops.AttnOptions, device: str) -> ops.AttnOptions:
    """The options that ``name`` lists; the sinks reach from no weight to most of it."""
    if "softcap" in name:
        base = replace(base, softcap=1.5)  # low: most scores are bent
    if "sinks" in name:
        base = replace(base, sinks=4 * randn(HEADS[0], device=device, seed=3))
    if "window" in name:
        base = replace(base, window=40)
    return replace(base, alibi_slopes=alibi_slopes(HEADS[0], device)) if "alibi" in name else base


def defined_token(q: Tensor, cache: Tensor, batch: ops.AttnBatch, options: ops.AttnOptions) -> Tensor:
    return ops.token_attention(wide(q), wide(cache), batch, options)


def defined_context(q: Tensor, kv: Tensor, cache: Tensor, batch: ops.AttnBatch, options: ops.AttnOptions) -> Tensor:
    return ops.context_attention(wide(q), wide(kv), wide(cache), batch, options)


@each_backend(ops.token_attention)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_decode_row_sees_its_window(backend: str, window: int) -> None:
    dtype = torch.float32
    q, cache, batch, options = attention_args(DECODE, HEADS, DIM, dtype, device_of(backend))
    options = replace(options, window=window)

    out = ops.token_attention.impls[backend](q, cache, batch, options)

    assert_close(out, defined_token(q, cache, batch, options), dtype)


@each_backend(ops.context_attention)
@pytest.mark.parametrize("window", WINDOWS)
def test_every_row_of_a_prompt_sees_its_window(backend: str, window: int) -> None:
    dtype = torch.float32
    q, kv, cache, batch, options = context_attention_args(CONTEXT, HEADS, DIM, dtype, device_of(backend))
    options = replace(options, window=window)
    expected = defined_context(q, kv, cache, batch, options)

    for has_decodes in (False, True):
        step = replace(batch, has_decodes=has_decodes, plans={})
        out = ops.context_attention.impls[backend](q, kv, cache, step, options)
        assert_close(out, expected, dtype)


def lose_keys_before_windows(batch: ops.AttnBatch, window: int) -> ops.AttnBatch:
    """The slots of the keys that no row may read, not even with weight 0, become one of NaN."""
    table = batch.req_to_token.clone()
    for row, ready in zip(batch.b_req_idx.tolist(), batch.b_ready_cache_len.tolist(), strict=True):
        table[row, : max(ready - window + 1 - ops.WINDOW_MARGIN, 0)] = table[0, 0]  # no request is in row 0
    return replace(batch, req_to_token=table, plans={})


def test_a_block_of_keys_is_no_longer_than_the_margin_of_windows() -> None:
    assert max(tiling.keys for tiling in TILINGS.values()) <= ops.WINDOW_MARGIN


@each_backend(ops.token_attention)
def test_a_decode_row_does_not_read_keys_far_before_its_window(backend: str) -> None:
    q, cache, batch, options = attention_args(DECODE, HEADS, DIM, torch.float32, device_of(backend))
    options = replace(options, window=30)
    expected = defined_token(q, cache, batch, options)

    out = ops.token_attention.impls[backend](q, cache, lose_keys_before_windows(batch, 30), options)

    assert_close(out, expected, torch.float32)


@each_backend(ops.context_attention)
def test_the_rows_of_a_prompt_do_not_read_keys_far_before_their_windows(backend: str) -> None:
    q, kv, cache, batch, options = context_attention_args(CONTEXT, HEADS, DIM, torch.float32, device_of(backend))
    options = replace(options, window=30)
    expected = defined_context(q, kv, cache, batch, options)

    for has_decodes in (False, True):
        step = replace(lose_keys_before_windows(batch, 30), has_decodes=has_decodes)
        assert_close(ops.context_attention.impls[backend](q, kv, cache, step, options), expected, torch.float32)


@each_backend_and_dtype(ops.token_attention)
@pytest.mark.parametrize("name", SCORE_OPTIONS)
def test_a_decode_row_follows_the_options_of_scores(backend: str, dtype: torch.dtype, name: str) -> None:
    q, cache, batch, options = attention_args(DECODE, HEADS, DIM, dtype, device_of(backend))
    options = options_of(name, options, device_of(backend))

    out = ops.token_attention.impls[backend](q, cache, batch, options)

    assert_close(out, defined_token(q, cache, batch, options), dtype)


@each_backend_and_dtype(ops.context_attention)
@pytest.mark.parametrize("name", SCORE_OPTIONS)
def test_the_rows_of_a_prompt_follow_the_options_of_scores(backend: str, dtype: torch.dtype, name: str) -> None:
    q, kv, cache, batch, options = context_attention_args(CONTEXT, HEADS, DIM, dtype, device_of(backend))
    options = options_of(name, options, device_of(backend))
    expected = defined_context(q, kv, cache, batch, options)

    for has_decodes in (False, True):
        step = replace(batch, has_decodes=has_decodes, plans={})
        out = ops.context_attention.impls[backend](q, kv, cache, step, options)
        assert_close(out, expected, dtype)


@pytest.mark.parametrize("backend", [name for name in ops.context_attention.impls if "invariant" not in name])
@pytest.mark.parametrize("window", [None, 1, 30, 4096])
def test_a_row_that_is_not_causal_sees_keys_on_both_sides(backend: str, window: int | None) -> None:
    lens = [(0, 1), (0, 37), (0, 64), (0, 150)]
    q, kv, cache, batch, options = context_attention_args(lens, HEADS, DIM, torch.float32, device_of(backend))
    options = replace(options, causal=False, window=window)

    out = ops.context_attention.impls[backend](q, kv, cache, batch, options)

    assert_close(out, defined_context(q, kv, cache, batch, options), torch.float32)


@pytest.mark.parametrize("backend", [name for name in ops.context_attention.impls if "invariant" not in name])
@pytest.mark.parametrize("window", [None, 30])
def test_the_last_tokens_of_a_request_may_be_no_keys(backend: str, window: int | None) -> None:
    """As those that expand a query. The last rows of one have no key in their window."""
    lens, num_keys = [(0, 1), (0, 37), (0, 64), (0, 150), (0, 20)], [1, 5, 64, 70, 19]
    q, kv, cache, batch, options = context_attention_args(lens, HEADS, DIM, torch.float32, device_of(backend))
    options = replace(options, causal=False, window=window)
    batch = replace(batch, b_num_keys=torch.tensor(num_keys, dtype=torch.int32, device=q.device))
    starts = [sum(new for _, new in lens[:i]) for i in range(len(lens))]

    out = ops.context_attention.impls[backend](q, kv, cache, batch, options)

    assert_close(out, defined_context(q, kv, cache, batch, options), torch.float32)
    for start, seen, (_, length) in zip(starts, num_keys, lens, strict=True):  # keys see the same without the others
        keys = replace(
            batch,
            b_num_keys=None,
            b_req_idx=batch.b_req_idx[starts.index(start)][None],
            b_start_loc=batch.b_start_loc.new_zeros(1),
            b_seq_len=batch.b_seq_len.new_full((1,), seen),
            b_ready_cache_len=batch.b_ready_cache_len.new_zeros(1),
            plans={},
        )
        rows = slice(start, start + seen)
        assert_close(out[rows], defined_context(q[rows], kv[rows], cache, keys, options), torch.float32)
        is_blind = [window is not None and position - seen >= window - 1 for position in range(length)]
        assert (out[start : start + length].abs().amax((1, 2)) == 0).tolist() == is_blind


@pytest.mark.parametrize("name", [*SCORE_OPTIONS, "window"])
def test_requests_that_share_a_prefix_follow_the_options(name: str) -> None:
    lens = [(length - 1, 1) for length in (250, 270, 203, 202)]
    q, cache, batch, options = attention_args(lens, HEADS, DIM, torch.float32, device_of("triton"))
    batch = share_prefixes(cache, batch, [(0, 4, 192)])
    options = options_of(name, options, device_of("triton"))

    out = ops.token_attention.impls["triton"](q, cache, batch, options)

    assert_close(out, defined_token(q, cache, batch, options), torch.float32)


def test_layers_with_different_windows_in_one_step_have_plans_of_their_own() -> None:
    q, cache, batch, options = attention_args(DECODE, HEADS, DIM, torch.float32, device_of("triton"))
    layers = [replace(options, window=window) for window in (None, 9, 64, None)]

    outs = [ops.token_attention.impls["triton"](q, cache, batch, layer) for layer in layers]

    for out, layer in zip(outs, layers, strict=True):
        assert_close(out, defined_token(q, cache, batch, layer), torch.float32)
    assert len(batch.plans) == 3


@pytest.mark.parametrize("backend", [ops.batch_invariant("cpu"), ops.batch_invariant("triton")])
def test_a_backend_refuses_an_option_that_it_does_not_implement(backend: str) -> None:
    q, kv, cache, batch, options = context_attention_args(
        [(3, 1), (9, 1)], (4, 2), 64, torch.float32, device_of(backend)
    )
    ops.context_attention.impls[backend](q, kv, cache, batch, options)  # the plan of other layers does not hide it

    with pytest.raises(NotImplementedError, match="does not implement the attention option causal=False; it has scale"):
        ops.context_attention.impls[backend](q, kv, cache, batch, replace(options, causal=False))
