"""The number of examples per test: set by pytest's --examples and --long."""

from __future__ import annotations

from hypothesis import settings

FUZZ = settings.get_profile("fuzz")
