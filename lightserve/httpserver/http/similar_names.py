"""Names of fields that are likely typing errors of one another."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from functools import lru_cache

CUTOFF = 0.82  # similarity: max_new_tokens and max_tokens have 0.83; top_a, another sampler, and top_k have 0.8
SEPARATORS = 0.1  # by how much lengths may differ more than CUTOFF allows, because of _ and -
MAX_LENGTH = 64  # characters of a name that is compared; comparing takes quadratic time


def similar_name(name: str, known: Sequence[str]) -> str | None:
    if len(name) > MAX_LENGTH:
        return None
    plain, letters = _plain(name), _letters(name)
    known = [candidate for candidate in known if _may_be_similar(name, candidate)]
    same = [candidate for candidate in known if _plain(candidate) == plain or _letters(candidate) == letters]
    near = same or difflib.get_close_matches(name, known, n=1, cutoff=CUTOFF)
    return near[0] if near else None


def _may_be_similar(name: str, candidate: str) -> bool:
    """A quick check of the lengths: difflib takes 10 us for a pair. A minimum is not a maximum."""
    is_near = 2 * min(len(name), len(candidate)) >= (CUTOFF - SEPARATORS) * (len(name) + len(candidate))
    return is_near and {name[:3], candidate[:3]} != {"min", "max"}


def printable_name(name: str) -> str:
    """For a header or a log: a client has chosen it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "?", name[:MAX_LENGTH])


@lru_cache(maxsize=4096)
def _letters(name: str) -> str:
    return "".join(sorted(name))


@lru_cache(maxsize=4096)
def _plain(name: str) -> str:
    """maxTokens, max-tokens and max_tokens are the same."""
    return re.sub(r"[-_\s]", "", name).lower()
