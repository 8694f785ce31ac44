"""Models compute with the definitions of the ops, on a device without traits, unless a test chooses others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightserve.common import ops


@pytest.fixture(autouse=True)
def _reference_backend() -> Iterator[None]:
    """An earlier test of this process may have bound another one."""
    ops.use_backend(ops.REFERENCE)
    ops.use_traits(ops.DeviceTraits())
    yield
    ops.use_traits(ops.DeviceTraits())
