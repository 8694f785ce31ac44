"""Checks of byte vocabularies, in which the id of a token is its rank."""

from __future__ import annotations

import base64
from collections.abc import Mapping


def decode_base64(text: str | bytes) -> bytes:
    """Raise ValueError if ``text`` is not base64 with its padding."""
    return base64.b64decode(text, validate=True)


def check_ranks(ranks: Mapping[bytes, int]) -> None:
    """Raise ValueError unless the ranks are 0, 1, 2, ... and every byte has one."""
    missing = set(range(len(ranks))) - set(ranks.values())
    if missing:
        raise ValueError(f"rank {min(missing)} is missing or occurs twice among {len(ranks)} ranks")
    bytes_without_rank = [byte for byte in range(256) if bytes((byte,)) not in ranks]
    if bytes_without_rank:
        raise ValueError(f"the byte 0x{bytes_without_rank[0]:02X} has no rank")
