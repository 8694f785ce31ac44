"""Tokens are written while their reader waits, in the order of their arrival, whoever writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from lightserve.httpserver.http.unread import Outs, UnreadTokens
from lightserve.messages.output import StrOut
from lightserve.messages.params import FinishReason
from lightserve.messages.step import Token


def out(text: str, finish_reason: FinishReason | None = None) -> tuple[int, StrOut]:
    return 0, StrOut(0, text, Token(1), finish_reason)


def texts(outs: Outs) -> list[str]:
    return [token.text for _, token in outs]


class Client:
    """Reads what is written, unless it is slow; a reader gets the rest."""

    def __init__(self) -> None:
        self.unread = UnreadTokens()
        self.written: list[str] = []
        self.read: list[str] = []
        self.is_slow = False

    def write(self, outs: Outs) -> bool:
        if not self.is_slow:
            self.written += texts(outs)
        return not self.is_slow

    async def run(self, messages: Sequence[Outs]) -> None:
        """Every message arrives while the reader waits."""
        self.unread.write = self.write
        reader = asyncio.create_task(self._read_all())
        for message in messages:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.unread.outs += message
            self.unread.deliver()
        await reader

    async def _read_all(self) -> None:
        while not self.read or self.read[-1] != "end":
            await self.unread.wait()
            self.read += texts(self.unread.take())


def test_tokens_are_written_without_the_reader_until_the_last_one() -> None:
    client = Client()

    asyncio.run(client.run([[out("a"), out("b")], [out("c")], [out("d"), out("end", FinishReason.STOP)]]))

    assert client.written == ["a", "b", "c"]
    assert client.read == ["d", "end"]


def test_the_reader_gets_what_a_slow_client_cannot_take_yet() -> None:
    client = Client()
    client.is_slow = True

    asyncio.run(client.run([[out("a")], [out("b")], [out("end", FinishReason.STOP)]]))

    assert client.written == []
    assert client.read == ["a", "b", "end"]


def test_nothing_is_written_while_the_reader_is_busy() -> None:
    """Its own tokens may not be sent yet."""

    async def arrive_twice() -> tuple[list[str], Outs]:
        client = Client()
        client.unread.write = client.write
        client.unread.outs.append(out("a"))
        client.unread.deliver()
        client.unread.outs.append(out("b"))
        client.unread.deliver()
        await asyncio.sleep(0)
        return client.written, client.unread.take()

    written, unread = asyncio.run(arrive_twice())

    assert written == []
    assert texts(unread) == ["a", "b"]


def test_an_error_of_the_writer_is_raised_and_its_tokens_are_not_written_again() -> None:
    def fail(outs: Outs) -> bool:
        raise ValueError("no JSON")

    async def arrive() -> UnreadTokens:
        unread = UnreadTokens()
        unread.write = fail
        waiting = asyncio.create_task(unread.wait())
        await asyncio.sleep(0)
        unread.outs.append(out("a"))
        with pytest.raises(ValueError, match="no JSON"):
            unread.deliver()
        unread.wake_reader()
        await waiting
        return unread

    assert asyncio.run(arrive()).outs == []
