"""Suggestions for names that are probably typos."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` may be a typo of. Leading dashes count for nothing: all flags have them."""
    by_letters: dict[str, list[str]] = {}
    for spelling in known:
        by_letters.setdefault(_letters(spelling), []).append(spelling)
    near = difflib.get_close_matches(_letters(name), by_letters, n=1)
    # of several spellings the one that has dashes or underscores where ``name`` has them
    return difflib.get_close_matches(name, by_letters[near[0]], n=1, cutoff=0)[0] if near else None


def _letters(name: str) -> str:
    return name.split("=")[0].lstrip("-").replace("-", "_").lower()
