from __future__ import annotations

import pytest
import torch

from lightserve.common.kv.req_manager import ReqManager


def test_rows_are_lent_once_and_come_back() -> None:
    rows = ReqManager(3, 16, torch.device("cpu"))

    lent = [rows.alloc() for _ in range(3)]

    assert sorted(lent) == [0, 1, 2]
    assert rows.padding_row == 3
    assert rows.req_to_token.shape == (4, 16)
    with pytest.raises(ValueError, match="all 3 request rows are taken"):
        rows.alloc()
    rows.free(lent[1])
    assert rows.num_free == 1
    with pytest.raises(ValueError, match=f"row {lent[1]} was freed twice"):
        rows.free(lent[1])
