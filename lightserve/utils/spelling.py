"""Suggestions for names that are probably typos."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` may be a typo of. Leading dashes count for nothing: all flags have them."""
    by_letters = {_letters(one): one for one in reversed(list(known))}
    near = difflib.get_close_matches(_letters(name), by_letters, n=1)
    return by_letters[near[0]] if near else None


def _letters(name: str) -> str:
    return name.split("=")[0].lstrip("-").replace("-", "_").lower()
