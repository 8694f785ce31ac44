from __future__ import annotations

import pytest
import torch

from lightserve.common.triton_kernel import _shared_prefix, _token_items


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other, also the hundreds that end at once for want of an item."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(_token_items, "MULTIPROCESSORS", 12)
        monkeypatch.setattr(_shared_prefix, "PROGRAMS", 48)
