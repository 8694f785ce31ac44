"""Models compute with the definitions of the ops unless a test chooses a backend."""

from __future__ import annotations

import pytest

from lightserve.common import ops


@pytest.fixture(autouse=True)
def _reference_backend() -> None:
    """An earlier test of this process may have bound another one."""
    ops.use_backend(ops.REFERENCE)
