from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightserve.common import ops
from lightserve.common.cpu_kernel._library import library
from lightserve.common.device import pick_device
from lightserve.common.device.profile import H200
from lightserve.common.triton_kernel import _gpu


@pytest.fixture(autouse=True)
def _reference_backend() -> None:
    """An earlier test of this process may have bound another one."""
    ops.use_backend(ops.REFERENCE)


@pytest.fixture(autouse=True)
def _traits_of_this_machine() -> Iterator[None]:
    device = pick_device()
    ops.use_traits(device.traits(device.torch_device(0)))
    yield
    ops.use_traits(ops.DeviceTraits())


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other, also the hundreds that end at once for want of an item."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(_gpu, "active", replace(H200, multiprocessors=12))


@pytest.fixture(autouse=True)
def _equal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, a row of ``tl.dot`` has the same bits wherever it is in its tile, as it has on a GPU.

    numpy's float32 product computes the last rows of a tile with other instructions on some CPUs. In float64 the
    difference vanishes when the product is rounded.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        monkeypatch.setattr("triton.runtime.interpreter.np", SimpleNamespace(**{**vars(np), "matmul": _matmul}))


def _matmul(a: Any, b: Any, dtype: Any) -> Any:
    return np.matmul(a, b, dtype=np.float64).astype(dtype)


@pytest.fixture(params=range(0 if library is None else library.ls_num_variants()))
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instructions that the C library uses: the best of this CPU, others that it has, or none in particular."""
    assert library is not None
    library.ls_use_variant(request.param)
    yield library.ls_variant().decode()
    library.ls_use_variant(0)
