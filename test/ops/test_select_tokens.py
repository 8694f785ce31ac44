from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel.latent import select_tokens as triton_select
from test.ops.cases import (
    BATCH_INVARIANT,
    bind,
    device_of,
    each_backend,
    each_backend_and_dtype,
    ints,
    randn,
    selection_args,
)

MIXED = [(0, 1), (0, 37), (5, 1), (70, 13), (0, 0), (600, 1), (140, 70)]
TOP_K = 40
SHAPES = [(16, 64), (5, 72), (1, 16)]  # heads and numbers of each
Lens = list[tuple[int, int]]


def seen_by_rows(batch: ops.AttnBatch) -> list[list[int]]:
    """The slots of the tokens that each query sees."""
    seen = []
    columns = (batch.b_req_idx, batch.b_seq_len, batch.b_ready_cache_len)
    for req, seq_len, ready in zip(*(column.tolist() for column in columns), strict=True):
        slots = batch.req_to_token[req, :seq_len].tolist()
        seen += [slots[: position + 1] for position in range(ready, seq_len)]
    return seen


def assert_best(found: Tensor, q: Tensor, weights: Tensor, cache: Tensor, batch: ops.AttnBatch, top_k: int) -> None:
    """All tokens where they are few; else as many as asked for, in their order, and none with a lower score."""
    for row, seen in enumerate(seen_by_rows(batch)):
        chosen = found[row, : min(top_k, len(seen))].tolist()
        places = [seen.index(slot) for slot in chosen]
        assert places == sorted(set(places))
        if len(seen) > top_k:
            keys = cache[torch.tensor(seen), 0].float().cpu()
            scores = weights[row].cpu() @ (q[row].float().cpu() @ keys.T).clamp(min=0)
            others = torch.ones(len(seen), dtype=torch.bool).index_fill_(0, torch.tensor(places), False)
            rounding = 1e-4 * scores.abs().max()
            assert scores[places].min() >= scores[others].max() - rounding


def test_the_definition_takes_the_highest_scores() -> None:
    q, weights, cache, batch, _ = selection_args([(90, 20)], (3, 8), torch.float32, "cpu")

    found = ops.select_tokens(q, weights, cache, batch, 7)

    for row, seen in enumerate(seen_by_rows(batch)):
        scores = [
            sum(
                float(weights[row, head]) * max(float(torch.dot(q[row, head], cache[slot, 0])), 0.0)
                for head in range(q.shape[1])
            )
            for slot in seen
        ]
        best = sorted(range(len(seen)), key=lambda place: -scores[place])[:7]
        assert found[row].tolist() == [seen[place] for place in sorted(best)]


@each_backend_and_dtype(ops.select_tokens)
@pytest.mark.parametrize("shape", SHAPES)
def test_select_tokens_takes_the_highest_scores(backend: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    args = selection_args(MIXED, shape, dtype, device_of(backend))[:4]

    found = ops.select_tokens.impls[backend](*args, TOP_K)

    assert_best(found, *args, TOP_K)


@each_backend(ops.select_tokens)
@pytest.mark.parametrize("lens", [[(0, 40)], [(39, 1)], [(40, 1)], [(0, 41)], [(511, 2)], [(512, 1), (1030, 3)]])
def test_select_tokens_crosses_its_limits(backend: str, lens: Lens) -> None:
    q, weights, cache, batch, _ = selection_args(lens, (4, 16), torch.float32, device_of(backend))

    found = ops.select_tokens.impls[backend](q, weights, cache, batch, TOP_K)

    expected = ops.select_tokens(q, weights, cache, batch, TOP_K)
    for row, seen in enumerate(seen_by_rows(batch)):
        count = min(TOP_K, len(seen))
        assert found[row, :count].tolist() == expected[row, :count].tolist()


@each_backend(ops.select_tokens)
@pytest.mark.parametrize("score", [0.0, -1.0, 1.0])
def test_of_equal_scores_the_first_tokens_count(backend: str, score: float) -> None:
    device = device_of(backend)
    q, weights, cache, batch, _ = selection_args([(600, 1)], (2, 16), torch.float32, device)
    slots = batch.req_to_token[int(batch.b_req_idx[0]), :601].long()
    q.fill_(1.0)
    weights.fill_(score)
    cache[slots] = 1.0
    cache[slots[[3, 550]]] = 2.0 if score > 0 else 0.0

    found = ops.select_tokens.impls[backend](q, weights, cache, batch, TOP_K)

    first = [3, 550] if score else []
    others = [place for place in range(601) if place not in first][: TOP_K - len(first)]
    assert found[0].tolist() == slots[sorted([*first, *others])].tolist()


def test_scores_are_computed_in_parts_that_fit_their_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    q, weights, cache, batch, _ = selection_args(MIXED, (4, 16), torch.float32, device_of("triton"))
    expected = ops.select_tokens.impls["triton"](q, weights, cache, batch, TOP_K)
    monkeypatch.setattr(triton_select, "SCORE_BYTES", 50 * 4 * batch.req_to_token.shape[1])

    found = ops.select_tokens.impls["triton"](q, weights, cache, batch, TOP_K)

    for row, seen in enumerate(seen_by_rows(batch)):
        assert torch.equal(found[row, : len(seen)], expected[row, : len(seen)])


@pytest.mark.parametrize("backend", BATCH_INVARIANT)
def test_a_choice_does_not_depend_on_what_was_cached(backend: str) -> None:
    device = device_of(backend)
    q, weights, cache, batch, _ = selection_args([(0, 90)], (4, 16), torch.float32, device)
    slots = batch.req_to_token[int(batch.b_req_idx[0])].long()
    cache[slots[30:80]] = cache[slots[29]]  # equal scores, if they have the same bits

    def chosen(ready: int, end: int) -> Tensor:
        lens = (ints([end], device), ints([ready], device))
        part = ops.AttnBatch(batch.req_to_token, batch.b_req_idx, torch.zeros_like(lens[0]), *lens)
        bind(backend)
        try:
            return ops.select_tokens(q[ready:end], weights[ready:end], cache, part, TOP_K)
        finally:
            ops.use_backend(ops.REFERENCE)

    whole = chosen(0, 90)

    for ready, end in [(0, 64), (40, 70), (41, 42), (89, 90)]:
        rows = slice(max(ready, TOP_K), end)
        assert torch.equal(chosen(ready, end)[rows.start - ready :], whole[rows])


def test_triton_refuses_sizes_that_do_not_match() -> None:
    q, weights, cache, batch, _ = selection_args([(3, 1)], (4, 16), torch.float32, device_of("triton"))

    with pytest.raises(ValueError, match=r"heads of q \(4, 16\), 3 weights a token and a cache of \(1, 16\) a token"):
        ops.select_tokens.impls["triton"](q, weights[:, :3], cache, batch, TOP_K)


def test_random_scores_of_any_sign_and_size_are_ordered() -> None:
    """Against a sort, with values whose bits are far apart, and infinities."""
    device = device_of("triton")
    lengths = (41, 700, 1500)
    q, weights, cache, batch, _ = selection_args([(n - 1, 1) for n in lengths], (1, 16), torch.float32, device)
    for i, length in enumerate(lengths):
        slots = batch.req_to_token[int(batch.b_req_idx[i]), :length].long()
        cache[slots] = 0.0
        cache[slots, 0, 0] = 10.0 ** (8 * randn(length, seed=i).to(device))
    q.fill_(1.0)
    weights.copy_(ints([1, -1, 1], device)[:, None])

    found = ops.select_tokens.impls["triton"](q, weights, cache, batch, TOP_K)

    assert torch.equal(found, ops.select_tokens(q, weights, cache, batch, TOP_K))
