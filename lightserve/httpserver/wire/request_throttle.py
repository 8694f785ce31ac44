"""Many requests that come at once, let in a few at a time."""

from __future__ import annotations

import asyncio
from collections import deque

PER_ROUND = 2  # some 1 ms of parsing, checking and encoding; 2,500 take no longer than with 8 a round


class Turns:
    """So many may begin in one round of the event loop; the others wait for the next rounds, in order.

    A round takes as long as all that begin in it: with two thousand at once, /health and the streams of others would
    wait a second.
    """

    def __init__(self, per_round: int = PER_ROUND) -> None:
        self._per_round = per_round
        self._begun = 0  # in this round
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
        if self._begun < self._per_round and not self._waiting:
            self._begin()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _begin(self) -> None:
        if self._begun == 0:
            asyncio.get_running_loop().call_soon(self._end_round)
        self._begun += 1

    def _end_round(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < self._per_round:
            turn = self._waiting.popleft()
            if not turn.done():  # else its client has left
                self._begin()
                turn.set_result(None)
