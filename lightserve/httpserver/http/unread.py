"""Tokens of a generation between their arrival and their reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lightserve.messages.output import StrOut

Outs = list[tuple[int, StrOut]]  # tokens, each with the index of its sequence
Write = Callable[[Outs], bool]  # to the client, now; False: nothing was written, the client must read first


class UnreadTokens:
    """A reader takes them, or they are written while it waits.

    To wake up a reader and to await the layers between it and the connection takes most of the time that a token costs
    in this process: 256 streams get a token each in every step.
    """

    def __init__(self) -> None:
        self.outs: Outs = []
        self.write: Write | None = None  # None: a reader takes all tokens
        self._has_arrived = asyncio.Event()
        self._is_awaited = False

    async def wait(self) -> None:
        """Until there are tokens to take, or ``wake_reader`` is called."""
        self._has_arrived.clear()
        self._is_awaited = True
        await self._has_arrived.wait()

    def wake_reader(self) -> None:
        self._is_awaited = False
        self._has_arrived.set()

    def take(self) -> Outs:
        outs, self.outs = self.outs, []
        return outs

    def close(self) -> None:
        """Nobody reads any more. The function that writes knows the generation, which knows this object."""
        self.write = None

    def deliver(self) -> None:
        """All tokens of a message have arrived. An error of ``write`` is raised: some may have been written."""
        outs = self.outs
        if self.write is None or not self._is_awaited or _has_end(outs):
            self.wake_reader()
            return
        self.outs = []
        if not self.write(outs):
            self.outs = outs
            self.wake_reader()


def _has_end(outs: Outs) -> bool:
    """Whether a sequence ends here, which is the reader's to handle."""
    if len(outs) == 1:
        return outs[0][1].finish_reason is not None
    return any(out.finish_reason is not None for _, out in outs)
