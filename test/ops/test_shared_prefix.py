"""Attention of requests that share prefixes, against the definition, which knows nothing of that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from lightserve.common import ops
from lightserve.common.triton_kernel.attention import _shared_prefix, token_attention
from lightserve.common.triton_kernel.attention._context_tiles import tiling_of
from test.ops.cases import (
    FLOATS,
    NAN,
    TOLERANCE,
    Groups,
    alibi_slopes,
    assert_close,
    attention_args,
    context_attention_args,
    device_of,
    each_backend,
    each_dtype,
    share_prefixes,
    wide,
)


def decodes(*lengths: int) -> list[tuple[int, int]]:
    return [(length - 1, 1) for length in lengths]


BATCHES: dict[str, tuple[list[tuple[int, int]], Groups]] = {
    "all in one group": (decodes(*[150] * 3), [(0, 3, 140)]),
    "own tokens of all lengths": (decodes(129, 130, 200, 300), [(0, 4, 128)]),
    "several groups, and rows in none": (decodes(100, 7, 140, 150, 90, 80, 70, 1), [(2, 2, 130), (4, 3, 66)]),
    "more rows than a tile": (decodes(*range(66, 84)), [(0, 18, 65)]),
    "a prefix of several parts": (decodes(400, 350), [(0, 2, 330)]),
    "a prefix of more parts than are merged at once": (decodes(1400, 1350), [(0, 2, 1330)]),
    "a prefix of less than a block": (decodes(30, 40), [(0, 2, 9)]),
    "no groups": (decodes(150, 3), []),
}


@pytest.mark.parametrize("dtype", FLOATS if torch.cuda.is_available() else FLOATS[:1])
@pytest.mark.parametrize(("lens", "groups"), BATCHES.values(), ids=BATCHES.keys())
def test_a_shared_prefix_changes_no_result(dtype: torch.dtype, lens: list[tuple[int, int]], groups: Groups) -> None:
    q, cache, batch, options = attention_args(lens, (8, 2), 64, dtype, device_of("triton"))
    batch = share_prefixes(cache, batch, groups)

    out = ops.token_attention.impls["triton"](q, cache, batch, options)

    assert_close(out, ops.token_attention(wide(q), wide(cache), batch, options), dtype)


@pytest.mark.interpreted
@each_dtype("triton")
@pytest.mark.parametrize(("heads", "dim"), [((3, 3), 128), ((6, 2), 80), ((20, 1), 64)])
@pytest.mark.parametrize("has_alibi", [False, True])
def test_a_prefix_is_shared_at_every_shape_of_a_model(
    dtype: torch.dtype, heads: tuple[int, int], dim: int, has_alibi: bool
) -> None:
    q, cache, batch, options = attention_args(decodes(150, 170, 3, 2), heads, dim, dtype, device_of("triton"))
    batch = share_prefixes(cache, batch, [(0, 2, 140)])
    options = replace(options, alibi_slopes=alibi_slopes(heads[0], device_of("triton")) if has_alibi else None)

    out = ops.token_attention.impls["triton"](q, cache, batch, options)

    assert_close(out, ops.token_attention(wide(q), wide(cache), batch, options), dtype)


@each_backend(ops.token_attention)
def test_every_backend_takes_the_hint_or_leaves_it(backend: str) -> None:
    q, cache, batch, options = attention_args(decodes(90, 7, 80), (4, 2), 64, torch.float32, device_of(backend))
    batch = share_prefixes(cache, batch, [(0, 1, 70)])

    out = ops.token_attention.impls[backend](q, cache, batch, options)

    assert_close(out, ops.token_attention(wide(q), wide(cache), batch, options), torch.float32)


def test_requests_with_nothing_behind_the_prefix_have_its_result_alone() -> None:
    q, cache, batch, options = attention_args(decodes(128, 128, 131), (4, 2), 64, torch.float32, device_of("triton"))
    batch = share_prefixes(cache, batch, [(0, 3, 128)])

    out = ops.token_attention.impls["triton"](q, cache, batch, options)

    assert_close(out, ops.token_attention(wide(q), wide(cache), batch, options), torch.float32)


def test_each_layer_of_a_step_has_its_own_prefix() -> None:
    q, cache, batch, options = attention_args(decodes(150, 160, 20), (4, 2), 64, torch.float32, device_of("triton"))
    batch = share_prefixes(cache, batch, [(0, 2, 128)])

    outs = [ops.token_attention.impls["triton"](q, layer, batch, options) for layer in (cache, -cache, cache)]

    assert_close(outs[1], ops.token_attention(wide(q), -wide(cache), batch, options), torch.float32)
    assert torch.equal(outs[0], outs[2])


def test_decodes_beside_prompts_share_a_prefix() -> None:
    lens = [(0, 37), *decodes(150, 170), (70, 13)]
    q, kv, cache, batch, options = context_attention_args(lens, (4, 2), 64, torch.float32, device_of("triton"))
    batch = replace(share_prefixes(cache, batch, [(1, 2, 140)]), has_decodes=True)

    out = ops.context_attention.impls["triton"](q, kv, cache, batch, options)

    assert_close(out, ops.context_attention(wide(q), wide(kv), wide(cache), batch, options), torch.float32)


def test_the_keys_of_a_shared_prefix_are_read_in_one_place() -> None:
    """Without the hint every request reads its own row of the table; with it, only the first one's is looked at."""
    q, cache, batch, options = attention_args(decodes(150, 160, 155), (4, 2), 64, torch.float32, device_of("triton"))
    batch = share_prefixes(cache, batch, [(0, 3, 128)])
    expected = ops.token_attention(wide(q), wide(cache), batch, options)
    nan_slot = int(cache.isnan().all(dim=(1, 2)).nonzero()[0])
    batch.req_to_token[batch.b_req_idx[1:].long(), :128] = nan_slot

    out = ops.token_attention.impls["triton"](q, cache, batch, options)
    plain = ops.token_attention.impls["triton"](q, cache, replace(batch, shared_prefixes=None, plans={}), options)

    assert_close(out, expected, torch.float32)
    assert bool(plain[1:].isnan().all())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 5000)), max_size=4),
    heads=st.sampled_from([(32, 8), (4, 4), (64, 1), (28, 4)]),
)
def test_items_cover_every_row_and_shared_key_once(sizes: list[tuple[int, int, int]], heads: tuple[int, int]) -> None:
    """``sizes``: of each group, requests in no group before it, its own, and the tokens that these share."""
    groups, requests = [], 0
    for alone, members, tokens in sizes:
        groups.append((requests + alone, members, tokens))
        requests += alone + members
    requests += 1
    q, cache, batch, _ = attention_args(decodes(*[1] * requests), heads, 16, torch.float16, device_of("triton"))
    batch = share_prefixes(cache, batch, [])
    assert batch.shared_prefixes is not None
    for i, group in enumerate(groups):
        batch.shared_prefixes[i, :3] = torch.tensor(group)
    keys = tiling_of(q.element_size(), q.shape[2]).keys

    plan = _shared_prefix.plan_shared_prefix(batch, q, heads[1], batch.shared_prefixes)

    seen: set[tuple[int, int]] = set()  # request, block of keys
    blocks = 0
    tables = batch.b_req_idx.tolist()
    b_partials = plan.b_partials.tolist()
    places = [{first + i * step for i in range(count)} for first, step, count in b_partials]
    num_written = 0
    for item, (req_idx, first, members, begin, end, *_) in enumerate(plan.items.tolist()):
        if members == 0:
            continue
        tile = plan.partials.shape[1]
        assert all(item * tile + i in places[first + i] for i in range(members))
        num_written += members
        group = next(group for group in groups if group[0] <= first < group[0] + group[1])
        assert req_idx == tables[group[0]]
        assert begin < end
        assert begin % keys == end % keys == 0
        found = {(r, key) for r in range(first, first + members) for key in range(begin, end, keys)}
        seen |= found
        blocks += len(found)
    assert num_written == sum(len(of_request) for of_request in places), "a partial result was never written"
    expected = [tokens // keys * keys for _, _, tokens in groups]
    assert len(seen) == blocks
    assert seen == {
        (r, key)
        for (first, members, _), end in zip(groups, expected, strict=True)
        for r in range(first, first + members)
        for key in range(0, end, keys)
    }
    shared_len = [0] * requests
    for (first, members, _), end in zip(groups, expected, strict=True):
        shared_len[first : first + members] = [end] * members
    assert plan.b_shared_len.tolist() == shared_len


def test_what_is_launched_does_not_depend_on_the_groups() -> None:
    shapes = set()
    for groups in BATCHES["no groups"][1], [(0, 4, 240)], [(0, 2, 70), (2, 2, 200)]:
        q, cache, batch, options = attention_args(decodes(*[250] * 4), (4, 2), 64, torch.float32, device_of("triton"))
        batch = share_prefixes(cache, batch, groups)
        out = torch.full(q.shape, NAN, device=q.device)
        token_attention.launch(q, cache, batch, options, out)
        (plan,) = batch.plans.values()
        assert plan.shared is not None
        shapes.add((plan.splits.splits.shape, plan.shared.items.shape, plan.shared.partials.shape))
        torch.testing.assert_close(out, ops.token_attention(q, cache, batch, options), **TOLERANCE[torch.float32])

    assert len(shapes) == 1
