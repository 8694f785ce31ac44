from __future__ import annotations

import pytest
import torch

from lightserve.common.kv.req_manager import ReqManager


def test_a_row_has_one_request_until_it_is_freed() -> None:
    rows = ReqManager(3, 16, torch.device("cpu"))

    taken = [rows.alloc() for _ in range(3)]

    assert sorted(taken) == [0, 1, 2]
    assert rows.padding_row == 3
    assert rows.req_to_token.shape == (4, 16)
    with pytest.raises(ValueError, match="all 3 request rows are taken"):
        rows.alloc()
    rows.free(taken[1])
    assert rows.num_free == 1
    with pytest.raises(ValueError, match=f"row {taken[1]} was freed twice"):
        rows.free(taken[1])
