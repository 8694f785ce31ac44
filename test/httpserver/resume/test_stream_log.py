"""The stream log of an HTTP process with a real Redis: in order, soon, and never in the way."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import psutil
import pytest

from lightserve.httpserver.http.sse import Outs
from lightserve.httpserver.resume import stream_log as module
from lightserve.httpserver.resume.logged_stream import NewStream
from lightserve.httpserver.resume.records import PROCESS_PREFIX, Entry, Keys, decode_head
from lightserve.httpserver.resume.redis import RedisConnection, RedisError
from lightserve.httpserver.resume.stream_log import StreamLog
from lightserve.messages.output import StrOut
from lightserve.messages.step import Token
from lightserve.utils.net import RedisAddress
from test.waiting import DEADLINE_S, until
from test.worker.kv.block_store.redis_server import redis_server

TOKEN: Outs = [(0, StrOut(1, "a", Token(5)))]


class Generation:
    def fix_seeds(self, seeds: Sequence[int] | None = None) -> list[int]:
        return [7]

    def continue_after(self, outs: Outs, age_s: float) -> None:
        raise NotImplementedError


def begin(stream_log: StreamLog) -> NewStream:
    state = {"request_id": "r1", "response_id": "resp_2"}
    logged = NewStream(stream_log, "owner", "/v1/responses", state, [b'{"a"', b":1}"])
    logged.begin(Generation(), b": keep-alive\n\n")
    return logged


@contextlib.asynccontextmanager
async def running(address: str, ttl_s: float = 60.0) -> AsyncIterator[StreamLog]:
    stream_log = StreamLog(f"redis://{address}", ttl_s)
    task = asyncio.create_task(stream_log.run())
    try:
        yield stream_log
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def check(folder: Path, scenario: Callable[[StreamLog, RedisConnection], Awaitable[None]], ttl_s: float = 60.0) -> None:
    async def run(address: str) -> None:
        host, _, port = address.partition(":")
        connection = await RedisConnection.open(RedisAddress(host, int(port)))
        try:
            async with running(address, ttl_s) as stream_log:
                await scenario(stream_log, connection)
        finally:
            connection.close()

    with redis_server(folder) as address:
        asyncio.run(run(address))


async def entries(connection: RedisConnection, keys: Keys) -> list[Entry]:
    (found,) = await connection.call((b"XRANGE", keys.events, b"-", b"+"))
    return [Entry.of(one) for one in found]


async def wait_for_entries(connection: RedisConnection, keys: Keys, count: int) -> list[Entry]:
    async with asyncio.timeout(DEADLINE_S):
        while len(found := await entries(connection, keys)) < count:  # noqa: ASYNC110  Redis has no event
            await asyncio.sleep(0.001)
    return found


async def wait_until_deleted(connection: RedisConnection, keys: Keys) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await connection.call((b"EXISTS", keys.head, keys.events)))[0]:  # noqa: ASYNC110  Redis has no event
            await asyncio.sleep(0.001)


def test_the_stream_log_has_the_request_and_the_events_of_a_stream(tmp_path: Path) -> None:
    async def scenario(stream_log: StreamLog, redis: RedisConnection) -> None:
        logged, sent = begin(stream_log), []
        for number in range(1, 4):
            sent.append(logged.add(TOKEN, b"data: %d\n\n" % number))
            await wait_for_entries(redis, logged.keys, number)
        logged.add(TOKEN, b"")  # a token without an event
        sent.append(logged.end(b"data: [DONE]\n\n"))

        found = await wait_for_entries(redis, logged.keys, 5)

        assert [entry.events for entry in found] == [*sent, b""]
        assert sent[2] == b"data: 3\nid: %b.3\n\n" % logged.keys.events.rpartition(b":")[2]
        assert [entry.last for entry in found] == [1, 2, 3, 4, 4]
        assert [len(entry.outs) for entry in found] == [1, 1, 1, 1, 0]
        assert [entry.is_end for entry in found] == [False] * 4 + [True]
        head, body, process, ttl_ms, alive = await redis.call(
            (b"HGET", logged.keys.head, b"head"),
            (b"HGET", logged.keys.head, b"body"),
            (b"HGET", logged.keys.head, b"process"),
            (b"PTTL", logged.keys.events),
            (b"EXISTS", PROCESS_PREFIX + stream_log.token),
        )
        assert body == b'{"a":1}'
        assert decode_head(head).seeds == [7]
        assert (decode_head(head).request_id, decode_head(head).response_id) == ("r1", "resp_2")
        assert process == stream_log.token
        assert 60_000 < ttl_ms <= 75_000
        assert alive == 1

    check(tmp_path, scenario)


def test_the_events_of_some_steps_are_one_entry(tmp_path: Path) -> None:
    async def scenario(stream_log: StreamLog, redis: RedisConnection) -> None:
        logged = begin(stream_log)
        sent = [logged.add(TOKEN, b"data: %d\n\n" % number) for number in range(1, 4)]

        (entry,) = await wait_for_entries(redis, logged.keys, 1)

        assert entry.events == b"".join(sent)
        assert (entry.last, len(entry.outs)) == (3, 3)
        assert entry.after(1) == sent[1] + sent[2]

    check(tmp_path, scenario)


def test_most_events_are_in_redis_within_100_ms(tmp_path: Path) -> None:
    async def scenario(stream_log: StreamLog, redis: RedisConnection) -> None:
        logged = begin(stream_log)
        behind_s = []
        for number in range(20):
            began_s = asyncio.get_running_loop().time()
            logged.add(TOKEN, b"data: x\n\n")
            await wait_for_entries(redis, logged.keys, number + 1)
            behind_s.append(asyncio.get_running_loop().time() - began_s)

        assert sorted(behind_s)[10] < 0.1

    check(tmp_path, scenario)


def test_a_stream_of_another_process_is_neither_deleted_nor_written(tmp_path: Path) -> None:
    async def scenario(stream_log: StreamLog, redis: RedisConnection) -> None:
        logged = begin(stream_log)
        logged.add(TOKEN, b"data: 1\n\n")
        await wait_for_entries(redis, logged.keys, 1)
        other = (b"outs", b"\x90", b"events", b"data: x\n\n")
        await redis.call(
            (b"HSET", logged.keys.head, b"process", b"another"),
            (b"XADD", logged.keys.events, b"9-0", *other),
        )

        logged.add(TOKEN, b"data: 2\n\n")
        await until(lambda: stream_log.counts.lost == 1)
        unsent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await logged.wait_for_reconnect(unsent)

        assert [entry.last for entry in await entries(redis, logged.keys)] == [1, 9]
        assert logged.add(TOKEN, b"data: 3\n\n") == b"data: 3\n\n"

    check(tmp_path, scenario)


def test_an_abandoned_stream_is_deleted_after_its_time(tmp_path: Path) -> None:
    async def scenario(stream_log: StreamLog, redis: RedisConnection) -> None:
        logged = begin(stream_log)
        logged.add(TOKEN, b"data: 1\n\n")
        await wait_for_entries(redis, logged.keys, 1)
        unsent: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        await logged.wait_for_reconnect(unsent)

        await wait_until_deleted(redis, logged.keys)

    check(tmp_path, scenario, ttl_s=1.0)


def test_a_redis_that_hangs_loses_streams_and_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.1)

    async def scenario(stream_log: StreamLog, redis: RedisConnection) -> None:
        (process,) = [one for one in psutil.Process().children() if "redis" in one.name()]
        logged = begin(stream_log)
        logged.add(TOKEN, b"data: 1\n\n")
        await wait_for_entries(redis, logged.keys, 1)
        process.send_signal(signal.SIGSTOP)
        logged.add(TOKEN, b"data: 2\n\n")
        await until(lambda: stream_log.counts.lost == 1)

        assert logged.add(TOKEN, b"data: 3\n\n") == b"data: 3\n\n"
        process.send_signal(signal.SIGCONT)
        await wait_until_deleted(redis, logged.keys)  # nobody must wait for its end
        later = begin(stream_log)
        assert later.add(TOKEN, b"data: 1\n\n").endswith(b".1\n\n")
        await wait_for_entries(redis, later.keys, 1)

    check(tmp_path, scenario)


def test_replies_of_every_kind_are_understood(tmp_path: Path) -> None:
    async def scenario(_: StreamLog, redis: RedisConnection) -> None:
        pong, count, nothing, refused, nested = await redis.call(
            (b"PING",),
            (b"RPUSH", b"list", b"a\r\nb", 7),
            (b"GET", b"none"),
            (b"GET", b"list"),
            (b"LRANGE", b"list", 0, -1),
        )

        assert (pong, count, nothing, nested) == (b"PONG", 2, None, [b"a\r\nb", b"7"])
        assert isinstance(refused, RedisError)

    check(tmp_path, scenario)


def test_replies_that_come_in_many_pieces_are_understood(tmp_path: Path) -> None:
    async def scenario(_: StreamLog, redis: RedisConnection) -> None:
        large = bytes(range(256)) * 20_000
        await redis.call(*[(b"RPUSH", b"large", large) for _ in range(3)])

        found, length = await redis.call((b"LRANGE", b"large", 0, -1), (b"LLEN", b"large"))

        assert found == [large] * 3
        assert length == 3

    check(tmp_path, scenario)
