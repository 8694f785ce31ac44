from __future__ import annotations

import pytest
import torch

from lightserve.common import ops
from test.ops.cases import device_of, each_backend_and_dtype, ints, randn, strided


@each_backend_and_dtype(ops.vocab_embedding)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [1, 33, 1100])
def test_embedding_picks_the_ranks_rows_and_zeros_the_others(
    backend: str, dtype: torch.dtype, id_dtype: torch.dtype, width: int
) -> None:
    table = randn(10, width, dtype=dtype, device=device_of(backend))
    ids = ints([20, 29, 19, 30, 0, 25, 25], device_of(backend), id_dtype)

    out = ops.vocab_embedding.impls[backend](ids, table, 20)

    zeros = torch.zeros_like(table[0])
    expected = torch.stack([table[0], table[9], zeros, zeros, zeros, table[5], table[5]])
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@each_backend_and_dtype(ops.vocab_embedding)
def test_embedding_follows_the_strides_of_ids_and_table(backend: str, dtype: torch.dtype) -> None:
    table = strided(randn(10, 33, dtype=dtype, device=device_of(backend)))
    ids = ints([3, 9, 0, 9, 7], device_of(backend))

    out = ops.vocab_embedding.impls[backend](ids[::2], table, 0)

    torch.testing.assert_close(out, table[[3, 0, 7]], rtol=0, atol=0)
