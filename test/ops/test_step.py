from __future__ import annotations

import pytest
import torch

from lightserve.common import ops
from lightserve.common.ops.step import LAST_SAMPLED, StepTokens
from test.ops.cases import backends_of, device_of, ints


@pytest.mark.parametrize("backend", backends_of(ops.place_tokens))
@pytest.mark.parametrize("count", [1, 5, 300])
def test_tokens_are_placed_and_sampled_ones_are_found(backend: str, count: int) -> None:
    device = device_of(backend)
    order = torch.randperm(count)
    rows, positions = order % 7, order // 7
    ids = torch.where(order % 3 == 0, LAST_SAMPLED, order + 1000)
    table = torch.full((8, 60), -5, dtype=torch.int32, device=device)
    last_ids = torch.arange(500, 508, device=device)
    tokens = StepTokens(*(ints(column.tolist(), device) for column in (rows, positions, order + 10_000, ids)))

    out = ops.place_tokens.impls[backend](tokens, table, last_ids)

    assert out.tolist() == [
        int(last_ids[row]) if i == LAST_SAMPLED else i for row, i in zip(rows, ids.tolist(), strict=True)
    ]
    assert table[rows, positions].tolist() == (order + 10_000).tolist()
    assert int((table == -5).sum()) == table.numel() - count


@pytest.mark.parametrize("backend", [ops.REFERENCE, *backends_of(ops.place_tokens)])
def test_token_0_replaces_a_sample_without_a_token(backend: str) -> None:
    device = device_of(backend)
    table = torch.zeros((4, 8), dtype=torch.int32, device=device)
    last_ids = torch.tensor([7, ops.NO_TOKEN, ops.NO_TOKEN, 9], device=device)
    columns = ([0, 1, 2, 3], [0] * 4, [0] * 4, [LAST_SAMPLED, LAST_SAMPLED, 5, LAST_SAMPLED])

    out = ops.place_tokens.impls[backend](StepTokens(*(ints(column, device) for column in columns)), table, last_ids)

    assert out.tolist() == [7, 0, 5, 9]
