from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lightserve.common import ops
from lightserve.common.device.profile import H200
from lightserve.common.triton_kernel import _gpu
from lightserve.common.triton_kernel.attention import _token_splits, token_attention
from test.ops.cases import (
    HEAD_DIMS,
    NAN,
    TOLERANCE,
    alibi_slopes,
    assert_close,
    attention_args,
    batch_of,
    device_of,
    each_backend_and_dtype,
    ints,
    randn,
    wide,
)

HEADS = [(1, 1), (3, 3), (6, 2), (5, 1)]
DECODE = [(length - 1, 1) for length in (1, 2, 32, 33, 129, 300)]


@each_backend_and_dtype(ops.token_attention)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_token_attention_matches_its_definition_at_every_head_dim(backend: str, dtype: torch.dtype, dim: int) -> None:
    q, cache, batch, options = attention_args(DECODE, (2, 1), dim, dtype, device_of(backend))

    out = ops.token_attention.impls[backend](q, cache, batch, options)

    assert_close(out, ops.token_attention(wide(q), wide(cache), batch, options), dtype)


@each_backend_and_dtype(ops.token_attention)
@pytest.mark.parametrize("heads", [*HEADS, (20, 1)])
@pytest.mark.parametrize("has_alibi", [False, True])
def test_token_attention_shares_kv_heads_among_a_group(
    backend: str, dtype: torch.dtype, heads: tuple[int, int], has_alibi: bool
) -> None:
    q, cache, batch, options = attention_args([(139, 1), (6, 1)], heads, 64, dtype, device_of(backend))
    options = replace(options, alibi_slopes=alibi_slopes(heads[0], device_of(backend)) if has_alibi else None)

    out = ops.token_attention.impls[backend](q, cache, batch, options)

    assert_close(out, ops.token_attention(wide(q), wide(cache), batch, options), dtype)


@each_backend_and_dtype(ops.token_attention)
def test_token_attention_reads_a_context_longer_than_all_its_splits(backend: str, dtype: torch.dtype) -> None:
    q, cache, batch, options = attention_args([(4999, 1)], (1, 1), 64, dtype, device_of(backend))

    out = ops.token_attention.impls[backend](q, cache, batch, options)

    assert_close(out, ops.token_attention(wide(q), wide(cache), batch, options), dtype)


@each_backend_and_dtype(ops.token_attention)
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_token_attention_of_a_ragged_batch(backend: str, dtype: torch.dtype, dim: int, group: int) -> None:
    lens = [(length - 1, 1) for length in (190, 1, 64, 65)]
    q, cache, batch, options = attention_args(lens, (2 * group, 2), dim, dtype, device_of(backend))
    options = replace(options, alibi_slopes=alibi_slopes(2 * group, device_of(backend)))

    out = ops.token_attention.impls[backend](q, cache, batch, options)

    assert_close(out, ops.token_attention(wide(q), wide(cache), batch, options), dtype)


@each_backend_and_dtype(ops.token_attention)
def test_token_attention_of_padded_rows_leaves_the_others_as_they_are(backend: str, dtype: torch.dtype) -> None:
    q, cache, batch, options = attention_args([(299, 1), (6, 1), *[(0, 1)] * 6], (4, 2), 64, dtype, device_of(backend))
    batch.b_req_idx[2:] = 0  # one row of the table for all that pad
    batch.req_to_token[0] = batch.req_to_token[batch.b_req_idx[0], 0]

    out = ops.token_attention.impls[backend](q, cache, batch, options)

    assert_close(out, ops.token_attention(wide(q), wide(cache), batch, options), dtype)


@each_backend_and_dtype(ops.token_attention)
def test_token_attention_of_a_step_gives_each_layer_its_own(backend: str, dtype: torch.dtype) -> None:
    q, cache, batch, options = attention_args([(299, 1), (6, 1)], (4, 2), 64, dtype, device_of(backend))

    outs = [ops.token_attention.impls[backend](q, layer, batch, options) for layer in (cache, -cache, cache)]

    assert_close(outs[1], ops.token_attention(wide(q), -wide(cache), batch, options), dtype)
    assert torch.equal(outs[0], outs[2])


def test_triton_refuses_heads_that_cannot_share_the_cache() -> None:
    q, cache, batch, options = attention_args([(3, 1)], (4, 2), 64, torch.float32, device_of("triton"))

    with pytest.raises(ValueError, match="3 heads of 64 cannot share the cache's 2 of 64"):
        ops.token_attention.impls["triton"](q[:, :3], cache, batch, options)
    with pytest.raises(ValueError, match="the last dimension of q must be contiguous"):
        ops.token_attention.impls["triton"](q.mT.contiguous().mT, cache, batch, options)


@pytest.mark.parametrize("backend", ["triton", ops.batch_invariant("triton")])
def test_triton_refuses_a_head_dim_over_its_limit(backend: str) -> None:
    args = attention_args([(3, 1)], (1, 1), 520, torch.float32, device_of("triton"))

    with pytest.raises(ValueError, match="head_dim 520 is over the limit 512 of the Triton attention kernels; use the"):
        ops.token_attention.impls[backend](*args)


def test_triton_refuses_a_batch_with_gaps() -> None:
    q, cache, batch, options = attention_args([(3, 1), (4, 1)], (4, 2), 64, torch.float32, device_of("triton"))
    gapped = replace(batch, b_seq_len=torch.stack((batch.b_seq_len, batch.b_seq_len), dim=1)[:, 0])

    with pytest.raises(ValueError, match="the last dimension of b_seq_len must be contiguous"):
        ops.token_attention.impls["triton"](q, cache, gapped, options)


MIXED = {
    "decodes first": [(140, 1), (5, 1), (0, 37), (70, 13)],
    "decodes last": [(0, 37), (70, 13), (0, 0), (140, 1), (5, 1)],
    "in any order": [(9, 2), (300, 1), (0, 0), (0, 1), (33, 20), (0, 0), (64, 1)],
    "one of several splits between prompts": [(90, 60), (900, 1), (0, 3)],
    "no decodes": [(0, 5), (0, 0), (70, 13)],
    "nothing": [(0, 0), (0, 0)],
}


@pytest.mark.parametrize("lens", MIXED.values(), ids=MIXED.keys())
def test_a_launch_fills_the_rows_of_requests_with_one_and_no_others(lens: list[tuple[int, int]]) -> None:
    q, cache, batch, options = attention_args(lens, (6, 2), 64, torch.float32, device_of("triton"))
    options = replace(options, alibi_slopes=alibi_slopes(6, device_of("triton")))
    expected = torch.full(q.shape, NAN, device=q.device)
    rows = [sum(new for _, new in lens[:i]) for i, (_, new) in enumerate(lens) if new == 1]
    expected[rows] = ops.context_attention(wide(q), wide(q), wide(cache), batch, options)[rows]
    out = torch.full(q.shape, NAN, device=q.device)

    for _ in range(2):  # the second finds the plan as the first left it
        token_attention.launch(q, cache, batch, options, out)
        torch.testing.assert_close(out, expected, **TOLERANCE[torch.float32], equal_nan=True)


@pytest.mark.parametrize("count", [4, 5, 7])
def test_token_attention_in_waves_matches_its_definition(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs per kv head run at once; one request is longer than its share."""
    monkeypatch.setattr(_gpu, "active", replace(H200, multiprocessors=1))
    lens = [(140, 1), (5, 1), (0, 9), (900, 1), (70, 1), (0, 1), (30, 2), (300, 1), (450, 1)][: count + 2]
    q, cache, batch, options = attention_args(lens, (6, 2), 64, torch.float32, device_of("triton"))
    rows = [sum(new for _, new in lens[:i]) for i, (_, new) in enumerate(lens) if new == 1]
    expected = ops.context_attention(wide(q), wide(q), wide(cache), batch, options)[rows]
    out = torch.full(q.shape, NAN, device=q.device)

    for _ in range(2):
        token_attention.launch(q, cache, batch, options, out)
        torch.testing.assert_close(out[rows], expected, **TOLERANCE[torch.float32])


LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "alike": lambda chance: chance.randrange(1025, 1151),
    "any": lambda chance: chance.randrange(1, 8001),
    "some long": lambda chance: chance.choice((1, 90, 300, 300, 5000)),
    "few very long": lambda chance: min(int(chance.paretovariate(0.5)), 100_000),
}


@pytest.mark.parametrize("count", [1, 3, 16, 33, 40, 66, 67, 80, 204, 256])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_splits_cover_all_keys_and_leave_no_multiprocessor_idle_for_long(
    lengths: Callable[[random.Random], int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brute force: 66 programs for each kv head take the splits in order."""
    monkeypatch.setattr(_gpu, "active", H200)
    chance = random.Random(count)
    keys = [lengths(chance) for _ in range(count)]
    lens = [(length - 1, 1) for length in keys]
    for _ in range(count % 3):
        lens.insert(chance.randrange(len(lens)), (30, 7))
    batch = batch_of(lens, torch.zeros(1, 1, dtype=torch.int32, device=device_of("triton")), [0] * len(lens))

    splits = _token_splits.plan_splits(batch, (32, 8, 128), block_n=32, programs_per_sm=4).splits.tolist()

    splits = splits[: sum(split[6] > 0 for split in splits)]
    assert all(split[6] for split in splits)
    spans: dict[int, list[tuple[int, int]]] = {}  # of the requests, by their first rows
    places: dict[int, set[tuple[int, int]]] = {}
    for row, _, begin, end, _, first, parts, _ in splits:
        spans.setdefault(row, []).append((begin, end))
        places.setdefault(row, set()).add((first, parts))
    starts = [sum(new for _, new in lens[:i]) for i in range(len(lens))]
    assert sorted(spans) == [start for start, (_, new) in zip(starts, lens, strict=True) if new == 1]
    for row, own in spans.items():
        length = lens[starts.index(row)][0] + 1
        assert own == [(begin, min(begin + own[0][1], length)) for begin in range(0, length, own[0][1])]
        first = next(i for i, split in enumerate(splits) if split[0] == row)
        assert places[row] == {(first, len(own))}

    free_at = [0] * 66
    for split in splits:
        heapq.heappushpop(free_at, free_at[0] + split[3] - split[2])
    assert max(free_at) <= 1.7 * sum(keys) / 66 + 96


def test_a_plan_takes_the_same_room_for_any_lengths() -> None:
    shapes = set()
    for lens in ([(0, 1)] * 3, [(5000, 1), (3, 1), (70, 1)], [(0, 0), (0, 40), (3, 1)]):
        _, _, batch, _ = attention_args(lens, (4, 2), 64, torch.float32, device_of("triton"))
        plan = _token_splits.plan_splits(batch, (4, 2, 64), block_n=32, programs_per_sm=4)
        shapes.add((plan.splits.shape, plan.done_counts.shape, plan.partials.shape))

    assert len(shapes) == 1


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
