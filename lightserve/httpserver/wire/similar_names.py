"""Names of fields that are likely typing errors of one another."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

CUTOFF = 0.82  # similarity: max_new_tokens and max_tokens have 0.83; top_a, another sampler, and top_k have 0.8
MAX_LENGTH = 64  # characters of a name that is compared; comparing takes quadratic time


def similar_name(name: str, known: Sequence[str]) -> str | None:
    if len(name) > MAX_LENGTH:
        return None
    known = [one for one in known if {one[:3], name[:3]} != {"min", "max"}]
    plain, letters = _plain(name), sorted(name)
    same = [one for one in known if _plain(one) == plain or sorted(one) == letters]
    near = same or difflib.get_close_matches(name, known, n=1, cutoff=CUTOFF)
    return near[0] if near else None


def printable_name(name: str) -> str:
    """For a header or a log: a client has chosen it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "?", name[:MAX_LENGTH])


def _plain(name: str) -> str:
    """maxTokens, max-tokens and max_tokens are the same."""
    return re.sub(r"[-_\s]", "", name).lower()
