"""What the grammar process answers: see process.py."""

from __future__ import annotations

import msgspec

STARTED = b"\1"  # a process has taken the grammar


class GrammarReport(msgspec.Struct, frozen=True):
    error: str = ""  # why the grammar cannot be used; "": it can
    memory_mib: int = 1  # that it takes when it is compiled
