"""How many cases each of these tests tries: pytest's --examples and --long say."""

from __future__ import annotations

from hypothesis import settings

FUZZ = settings.get_profile("fuzz")
