from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
import torch

import lightserve.ops
from lightserve.common import ops
from lightserve.common.device import base, registry
from lightserve.common.device.profile import H200
from lightserve.common.triton_kernel import _gpu
from test.aten.devices import Interpreted


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One more of another package; afterwards nothing is replaced."""
    found = [EntryPoint("interpreted", f"{Interpreted.__module__}:Interpreted", registry.ENTRY_POINTS)]
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == registry.ENTRY_POINTS else [])
    registry._loaded.cache_clear()
    monkeypatch.setattr(base, "_bound", None)
    yield
    lightserve.ops.disable()
    registry._loaded.cache_clear()
    ops.use_backend(ops.REFERENCE)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other, also those that end at once."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(_gpu, "active", replace(H200, multiprocessors=12))
