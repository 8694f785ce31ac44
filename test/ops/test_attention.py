from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from test.ops.cases import (
    NAN,
    assert_close,
    attention_args,
    device_of,
    each_backend_and_dtype,
    ints,
    randn,
    wide,
)

HEAD_DIMS = [64, 80, 96, 128, 256]
HEADS = [(1, 1), (3, 3), (6, 2), (5, 1)]
MIXED = [(0, 1), (0, 37), (5, 1), (70, 13), (33, 1), (0, 66)]  # (tokens in the cache, new tokens)
DECODE = [(length - 1, 1) for length in (1, 2, 32, 33, 129, 300)]


def alibi_slopes(heads: int, device: str) -> Tensor:
    return torch.tensor([2.0 ** -(1 + i) for i in range(heads)], device=device)


@each_backend_and_dtype(ops.context_attention)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_context_attention_matches_its_definition_at_every_head_dim(backend: str, dtype: torch.dtype, dim: int) -> None:
    q, cache, batch, scale = attention_args(MIXED, (2, 1), dim, dtype, device_of(backend))

    out = ops.context_attention.impls[backend](q, cache, batch, scale)

    assert_close(out, ops.context_attention(wide(q), wide(cache), batch, scale), dtype)


@each_backend_and_dtype(ops.context_attention)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("has_alibi", [False, True])
def test_context_attention_shares_kv_heads_among_a_group(
    backend: str, dtype: torch.dtype, heads: tuple[int, int], has_alibi: bool
) -> None:
    q, cache, batch, scale = attention_args([(3, 20), (0, 9)], heads, 64, dtype, device_of(backend))
    slopes = alibi_slopes(heads[0], device_of(backend)) if has_alibi else None

    out = ops.context_attention.impls[backend](q, cache, batch, scale, slopes)

    assert_close(out, ops.context_attention(wide(q), wide(cache), batch, scale, slopes), dtype)


@each_backend_and_dtype(ops.context_attention)
@pytest.mark.parametrize("lens", [[(0, 1)], [(0, 150)], [(129, 64)], [(64, 1), (0, 65)]])
def test_context_attention_crosses_tiles(backend: str, dtype: torch.dtype, lens: list[tuple[int, int]]) -> None:
    q, cache, batch, scale = attention_args(lens, (2, 1), 64, dtype, device_of(backend))
    slopes = alibi_slopes(2, device_of(backend))

    out = ops.context_attention.impls[backend](q, cache, batch, scale, slopes)

    assert_close(out, ops.context_attention(wide(q), wide(cache), batch, scale, slopes), dtype)


@each_backend_and_dtype(ops.context_attention)
def test_context_attention_survives_scores_that_overflow_an_exponential(backend: str, dtype: torch.dtype) -> None:
    q, cache, batch, scale = attention_args([(40, 30)], (2, 1), 64, dtype, device_of(backend))

    out = ops.context_attention.impls[backend](q * 8, cache * 8, batch, scale)

    assert_close(out, ops.context_attention(wide(q) * 8, wide(cache) * 8, batch, scale), dtype)


@each_backend_and_dtype(ops.token_attention)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_token_attention_matches_its_definition_at_every_head_dim(backend: str, dtype: torch.dtype, dim: int) -> None:
    q, cache, batch, scale = attention_args(DECODE, (2, 1), dim, dtype, device_of(backend))

    out = ops.token_attention.impls[backend](q, cache, batch, scale)

    assert_close(out, ops.token_attention(wide(q), wide(cache), batch, scale), dtype)


@each_backend_and_dtype(ops.token_attention)
@pytest.mark.parametrize("heads", [*HEADS, (20, 1)])
@pytest.mark.parametrize("has_alibi", [False, True])
def test_token_attention_shares_kv_heads_among_a_group(
    backend: str, dtype: torch.dtype, heads: tuple[int, int], has_alibi: bool
) -> None:
    q, cache, batch, scale = attention_args([(139, 1), (6, 1)], heads, 64, dtype, device_of(backend))
    slopes = alibi_slopes(heads[0], device_of(backend)) if has_alibi else None

    out = ops.token_attention.impls[backend](q, cache, batch, scale, slopes)

    assert_close(out, ops.token_attention(wide(q), wide(cache), batch, scale, slopes), dtype)


@each_backend_and_dtype(ops.token_attention)
@pytest.mark.parametrize("max_seq_len", [300, 5000, 1_000_000])
def test_token_attention_does_not_depend_on_how_long_a_request_might_be(
    backend: str, dtype: torch.dtype, max_seq_len: int
) -> None:
    q, cache, batch, scale = attention_args([(0, 1), (299, 1), (34, 1)], (2, 1), 64, dtype, device_of(backend))

    out = ops.token_attention.impls[backend](q, cache, replace(batch, max_seq_len=max_seq_len), scale)

    assert_close(out, ops.token_attention(wide(q), wide(cache), batch, scale), dtype)


@each_backend_and_dtype(ops.token_attention)
def test_token_attention_reads_a_context_longer_than_all_its_splits(backend: str, dtype: torch.dtype) -> None:
    q, cache, batch, scale = attention_args([(4999, 1)], (1, 1), 64, dtype, device_of(backend))

    out = ops.token_attention.impls[backend](q, cache, batch, scale)

    assert_close(out, ops.token_attention(wide(q), wide(cache), batch, scale), dtype)


@each_backend_and_dtype(ops.write_kv)
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (6, 80), (1, 3)])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_write_kv_fills_its_slots_and_no_others(
    backend: str, dtype: torch.dtype, heads: int, dim: int, slot_dtype: torch.dtype
) -> None:
    device = device_of(backend)
    layers = torch.full((9, 3, heads, dim), NAN, dtype=dtype, device=device)
    kv = randn(4, heads + 2, dim, dtype=dtype, device=device)[:, 2:]  # the tail of a fused qkv
    slots = ints([7, 0, 3, 8], device, slot_dtype)

    ops.write_kv.impls[backend](kv, slots, layers[:, 1])

    assert torch.equal(layers[slots.long(), 1], kv)
    assert int(layers.isnan().sum()) == layers.numel() - kv.numel()


@each_backend_and_dtype(ops.write_kv)
def test_write_kv_rounds_to_the_dtype_of_the_cache(backend: str, dtype: torch.dtype) -> None:
    kv = randn(2, 2, 64, device=device_of(backend))
    cache = torch.zeros(3, 2, 64, dtype=dtype, device=device_of(backend))

    ops.write_kv.impls[backend](kv, ints([2, 0], device_of(backend)), cache)

    assert torch.equal(cache[[2, 0]], kv.to(dtype))


@each_backend_and_dtype(ops.context_attention)
@pytest.mark.parametrize(
    "slots", [[2, 3, 4, 5, 6], [2, 4, 3, 5, 6], [6, 5, 4, 3, 2]], ids=["run", "swapped", "falling"]
)
@pytest.mark.parametrize("new", [1, 4])
def test_slots_that_are_neighbours_or_nearly_so_are_read_in_their_order(
    backend: str, dtype: torch.dtype, slots: list[int], new: int
) -> None:
    q, cache, batch, scale = attention_args([(5 - new, new)], (4, 2), 64, dtype, device_of(backend))
    cache.copy_(randn(*cache.shape, dtype=dtype, device=device_of(backend), seed=7))
    batch.req_to_token[batch.b_req_idx, :5] = ints(slots, device_of(backend))
    slopes = alibi_slopes(4, device_of(backend))

    out = ops.context_attention.impls[backend](q, cache, batch, scale, slopes)

    assert_close(out, ops.context_attention(wide(q), wide(cache), batch, scale, slopes), dtype)
