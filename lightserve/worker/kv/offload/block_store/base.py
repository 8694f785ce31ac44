"""What a place for blocks of KV must offer. Any thread may call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class BlockStore(Protocol):
    name: str  # of the tier, in metrics

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these ``get`` will probably find."""

    def get(self, key: bytes, into: memoryview) -> None:
        """Read a block. Raises BlockError if it is not there, or is not what was written."""

    def put(self, key: bytes, data: memoryview) -> bool:
        """Write a block; False: it is there already. Raises BlockError if that is not possible."""

    def remove(self, key: bytes) -> None:
        """It may be wrong."""

    @property
    def used_bytes(self) -> int:
        """0: it does not know."""
