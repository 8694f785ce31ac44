"""An API key as operators write it, in a file or a flag: the key, and after it what it is called and may do.

sk-4f...  name=search requests_per_minute=600 concurrency=8
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from lightserve.utils.spelling import nearest

NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
NUMBERS = ("requests_per_minute", "concurrency")
FIELDS = ("name", *NUMBERS)
MAX_LIMIT = 10**9


@dataclass(frozen=True, slots=True)
class KeySpec:
    key: str
    name: str | None = None
    requests_per_minute: int | None = None  # None: that of the flag
    concurrency: int | None = None

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.key.encode()).digest()

    @property
    def label(self) -> str:
        """In metrics. It does not tell the key."""
        return self.name or f"key-{self.digest.hex()[:8]}"


def parse_key(text: str) -> KeySpec:
    """Raises ValueError, without the key. A key without fields may contain spaces, but nothing like a field."""
    key, *words = text.split() or [text]
    pairs = [word.partition("=") for word in words]
    if not any(equals and nearest(name, FIELDS) for name, equals, _ in pairs):
        return KeySpec(text)
    values = {}
    for name, equals, value in pairs:
        if not equals or name not in FIELDS or name in values:
            raise ValueError(
                f"{(name + equals)[:40]!r}: after a key come {', '.join(f'{each}=' for each in FIELDS)}, once"
            )
        values[name] = value
    if "name" in values and not NAME.fullmatch(values["name"]):
        raise ValueError(f"name={values['name'][:80]!r}: must be up to 64 letters, digits and _.@-")
    numbers = {name: _number(name, values[name]) for name in NUMBERS if name in values}
    return KeySpec(key, values.get("name"), **numbers)


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_LIMIT:
        raise ValueError(f"{name}={text[:20]!r}: must be a whole number from 1 to {MAX_LIMIT:,}")
    return int(text)
