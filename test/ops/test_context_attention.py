from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.device.profile import H200
from lightserve.common.triton_kernel import _gpu
from lightserve.common.triton_kernel.attention._context_tiles import (
    FIRST_PART,
    FIRST_TOKEN,
    Q_LEN,
    REQ_IDX,
    SPLIT,
    SPLITS,
    SplitTiles,
    list_split_tiles,
    tiling_of,
)
from test.ops.cases import (
    HEAD_DIMS,
    NAN,
    alibi_slopes,
    assert_close,
    context_attention_args,
    device_of,
    each_backend_and_dtype,
    ints,
    randn,
    wide,
    with_alibi,
)

HEADS = [(1, 1), (3, 3), (6, 2), (5, 1), (20, 1)]
MIXED = [(0, 1), (0, 37), (5, 1), (70, 13), (33, 1), (0, 66)]  # (tokens in the cache, new tokens)
Lens = list[tuple[int, int]]


def defined(q: Tensor, kv: Tensor, cache: Tensor, batch: ops.AttnBatch, options: ops.AttnOptions) -> Tensor:
    return ops.context_attention(wide(q), wide(kv), wide(cache), batch, options)


@each_backend_and_dtype(ops.context_attention)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_context_attention_matches_its_definition_at_every_head_dim(backend: str, dtype: torch.dtype, dim: int) -> None:
    args = context_attention_args(MIXED, (2, 1), dim, dtype, device_of(backend))

    out = ops.context_attention.impls[backend](*args)

    assert_close(out, defined(*args), dtype)


@each_backend_and_dtype(ops.context_attention)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("has_alibi", [False, True])
def test_context_attention_shares_kv_heads_among_a_group(
    backend: str, dtype: torch.dtype, heads: tuple[int, int], has_alibi: bool
) -> None:
    slopes = alibi_slopes(heads[0], device_of(backend)) if has_alibi else None
    args = with_alibi(context_attention_args([(3, 20), (0, 9), (80, 4)], heads, 64, dtype, device_of(backend)), slopes)

    out = ops.context_attention.impls[backend](*args)

    assert_close(out, defined(*args), dtype)


@each_backend_and_dtype(ops.context_attention)
@pytest.mark.parametrize("lens", [[(0, 1)], [(0, 150)], [(0, 128)], [(129, 64)], [(64, 1), (0, 65)], [(300, 200)]])
@pytest.mark.parametrize("heads", [(2, 1), (1, 1)])
def test_context_attention_crosses_tiles(backend: str, dtype: torch.dtype, lens: Lens, heads: tuple[int, int]) -> None:
    slopes = alibi_slopes(heads[0], device_of(backend))
    args = with_alibi(context_attention_args(lens, heads, 64, dtype, device_of(backend)), slopes)

    out = ops.context_attention.impls[backend](*args)

    assert_close(out, defined(*args), dtype)


@each_backend_and_dtype(ops.context_attention)
def test_context_attention_survives_scores_that_overflow_an_exponential(backend: str, dtype: torch.dtype) -> None:
    q, kv, cache, batch, options = context_attention_args([(40, 30)], (2, 1), 64, dtype, device_of(backend))
    q = q * 40  # scores past 88, where the exponential of float32 ends

    out = ops.context_attention.impls[backend](q, kv, cache, batch, options)

    rounded = torch.float16 if dtype == torch.float32 else dtype  # the last bit of such a score is 1e-5 of its weight
    assert_close(out.to(rounded), defined(q, kv, cache, batch, options), rounded)


@each_backend_and_dtype(ops.context_attention)
@pytest.mark.parametrize(
    "lens", [[(0, 0), (0, 20), (7, 0)], [(9, 0)] * 5 + [(3, 70)], [(4, 40), (0, 0), (0, 0), (0, 3)], [(0, 0), (6, 0)]]
)
def test_a_request_without_new_tokens_takes_no_row(backend: str, dtype: torch.dtype, lens: Lens) -> None:
    args = context_attention_args(lens, (2, 1), 64, dtype, device_of(backend))

    out = ops.context_attention.impls[backend](*args)

    assert_close(out, defined(*args), dtype)


@each_backend_and_dtype(ops.context_attention)
def test_a_batch_of_many_requests_lists_every_tile(backend: str, dtype: torch.dtype) -> None:
    lens = [(i % 4, i % 3) for i in range(150)]
    args = context_attention_args(lens, (1, 1), 16, dtype, device_of(backend))

    out = ops.context_attention.impls[backend](*args)

    assert_close(out, defined(*args), dtype)


@each_backend_and_dtype(ops.context_attention)
@pytest.mark.parametrize("has_alibi", [False, True])
@pytest.mark.parametrize(
    "lens",
    [
        [(5, 1), (140, 1), (0, 1), (0, 37), (70, 13)],
        [(0, 37), (5, 1), (0, 0), (140, 1), (70, 13), (0, 1)],
        [(9, 1), (30, 1), (2, 1)],
        [(3, 1), (0, 0), (12, 9)],
        [(0, 2), (7, 3), (0, 0)],
    ],
)
def test_the_decodes_of_a_mixed_step_match_the_definition(
    backend: str, dtype: torch.dtype, lens: Lens, has_alibi: bool
) -> None:
    q, kv, cache, batch, options = context_attention_args(lens, (6, 2), 64, dtype, device_of(backend))
    options = replace(options, alibi_slopes=alibi_slopes(6, device_of(backend)) if has_alibi else None)
    expected = defined(q, kv, cache, batch, options)

    for has_decodes in (False, True):
        mixed = replace(batch, has_decodes=has_decodes, plans={})
        out = ops.context_attention.impls[backend](q, kv, cache, mixed, options)
        assert_close(out, expected, dtype)


@each_backend_and_dtype(ops.context_attention)
def test_rows_of_no_request_may_hold_anything(backend: str, dtype: torch.dtype) -> None:
    lens = [(0, 20), (0, 30), (5, 70), (0, 9)]
    q, kv, cache, batch, options = context_attention_args(lens, (2, 1), 64, dtype, device_of(backend))
    columns = ("b_req_idx", "b_start_loc", "b_seq_len", "b_ready_cache_len")
    kept = replace(batch, **{name: getattr(batch, name)[::2].contiguous() for name in columns})
    for rows in (slice(20, 50), slice(120, 129)):
        q[rows] = kv[rows] = NAN

    out = ops.context_attention.impls[backend](q, kv, cache, kept, options)

    expected = defined(q, kv, cache, kept, options)
    for rows in (slice(0, 20), slice(50, 120)):
        assert_close(out[rows], expected[rows], dtype)


@each_backend_and_dtype(ops.context_attention)
@pytest.mark.parametrize("lens", [[(0, 150)], [(70, 13), (0, 66)]])
def test_keys_and_values_need_no_alignment(backend: str, dtype: torch.dtype, lens: Lens) -> None:
    q, kv, cache, batch, options = context_attention_args(lens, (2, 1), 64, dtype, device_of(backend))
    apart = kv.new_full((len(kv), kv[0].numel() + 1), NAN)
    shifted = apart[:, 1:].view(kv.shape)
    shifted.copy_(kv)

    out = ops.context_attention.impls[backend](q, shifted, cache, batch, options)

    assert_close(out, defined(q, kv, cache, batch, options), dtype)


@each_backend_and_dtype(ops.context_attention)
def test_layers_of_a_step_share_what_was_derived_for_the_first(backend: str, dtype: torch.dtype) -> None:
    q, kv, cache, batch, options = context_attention_args([(8, 1), (3, 40)], (4, 2), 64, dtype, device_of(backend))
    batch = replace(batch, has_decodes=True, plans={})
    ops.context_attention.impls[backend](q, kv, cache, batch, options)
    derived = dict(batch.plans)

    out = ops.context_attention.impls[backend](-q, kv, cache, batch, options)

    assert_close(out, defined(-q, kv, cache, batch, options), dtype)
    assert derived.keys() == batch.plans.keys()
    assert all(batch.plans[name] is plan for name, plan in derived.items())


@each_backend_and_dtype(ops.context_attention)
@pytest.mark.parametrize(
    "slots", [[2, 3, 4, 5, 6], [2, 4, 3, 5, 6], [6, 5, 4, 3, 2]], ids=["run", "swapped", "falling"]
)
@pytest.mark.parametrize("new", [1, 4])
def test_slots_that_are_neighbours_or_nearly_so_are_read_in_their_order(
    backend: str, dtype: torch.dtype, slots: list[int], new: int
) -> None:
    device = device_of(backend)
    q, kv, cache, batch, options = context_attention_args([(5 - new, new)], (4, 2), 64, dtype, device)
    cache.copy_(randn(*cache.shape, dtype=dtype, device=device, seed=7))
    batch.req_to_token[batch.b_req_idx, :5] = ints(slots, device)
    kv.copy_(cache[slots[5 - new :]])
    options = replace(options, alibi_slopes=alibi_slopes(4, device))

    out = ops.context_attention.impls[backend](q, kv, cache, batch, options)

    assert_close(out, defined(q, kv, cache, batch, options), dtype)


def test_triton_refuses_heads_that_are_not_side_by_side() -> None:
    q, kv, cache, batch, options = context_attention_args([(3, 4)], (4, 2), 64, torch.float32, device_of("triton"))
    apart = torch.cat((q, q), dim=1)[:, ::2]

    with pytest.raises(ValueError, match="the heads of q must lie side by side"):
        ops.context_attention.impls["triton"](apart, kv, cache, batch, options)


LONG = [(2600, 9), (0, 3), (130, 1), (70, 40)]  # few new tokens, so that keys are split


@each_backend_and_dtype(ops.context_attention)
@pytest.mark.parametrize(("window", "has_decodes"), [(None, True), (1700, False)])
def test_context_attention_merges_the_splits_of_keys(
    backend: str, dtype: torch.dtype, window: int | None, has_decodes: bool
) -> None:
    device = device_of(backend)
    q, kv, cache, batch, options = context_attention_args(LONG, (4, 2), 64, dtype, device)
    sinks = randn(4, device=device, seed=6)
    options = replace(options, window=window, sinks=sinks, alibi_slopes=alibi_slopes(4, device))
    step = replace(batch, has_decodes=has_decodes, plans={})

    outs = [ops.context_attention.impls[backend](q, kv, cache, step, options) for _ in range(2)]

    assert_close(outs[0], defined(q, kv, cache, batch, options), dtype)
    assert torch.equal(outs[0], outs[1])  # the counters of finished splits are 0 again
    if backend == "triton":
        assert max_splits(step) > 1


def max_splits(batch: ops.AttnBatch) -> int:
    (plan,) = (plan for plan in batch.plans.values() if isinstance(plan, SplitTiles))
    return int(plan.tiles[plan.tiles[:, Q_LEN.value] > 0, SPLITS.value].max())


@pytest.mark.parametrize(
    ("lens", "splits"),
    [
        ([(5000, 64)], 6),  # few tiles
        ([(0, 700)], 1),  # merging would take longer than the second wave
        ([(9000, 700)], 3),  # one wave and a third
        ([(9000, 8192)], 1),
        ([(100_000, 32)] + [(0, 1024)] * 4, 20),  # a long one among many short ones
    ],
)
def test_keys_are_split_so_that_a_step_ends_sooner(monkeypatch: pytest.MonkeyPatch, lens: Lens, splits: int) -> None:
    monkeypatch.setattr(_gpu, "active", H200)
    batch = batch_of(lens)
    rows = sum(new for _, new in lens)

    plan = list_split_tiles(batch, rows, tiling_of(2, 128, 4 * 128), 4, 8, 128, 1, None)

    tiles = plan.tiles[plan.tiles[:, Q_LEN.value] > 0]
    assert int(tiles[:, SPLITS.value].max()) == splits
    expected = Counter[tuple[int, int, int]]()
    for row in tiles.tolist():
        expected[row[REQ_IDX.value], row[FIRST_TOKEN.value], row[SPLITS.value]] += 1
    assert all(count == parts for (_, _, parts), count in expected.items())
    tokens = 128 // 4
    assert {(req, first) for req, first, _ in expected} == {
        (req, first) for req, (_, new) in enumerate(lens) for first in range(0, new, tokens)
    }
    parts = tiles[tiles[:, SPLITS.value] > 1]
    places = (parts[:, FIRST_PART.value] + parts[:, SPLIT.value]).tolist()
    assert sorted(places) == list(range(len(places)))
    assert plan.done_counts is not None
    assert len(places) <= len(plan.done_counts)


def batch_of(lens: Lens) -> ops.AttnBatch:
    """A batch that only its lengths matter of."""
    ready, new = torch.tensor(lens, dtype=torch.int32).T.contiguous()
    none = torch.zeros(1, 1, dtype=torch.int32)
    starts = (new.cumsum(0) - new).to(torch.int32)
    return ops.AttnBatch(none, torch.arange(len(lens), dtype=torch.int32), starts, (ready + new).contiguous(), ready)
