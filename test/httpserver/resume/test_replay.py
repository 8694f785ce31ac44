"""Clients that come back for a stream whose process is dead, with a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from lightserve.errors import StreamGoneError, UnavailableError
from lightserve.httpserver.resume import replay as module
from lightserve.httpserver.resume.logged_stream import ResumedStream
from lightserve.httpserver.resume.records import (
    PROCESS_PREFIX,
    Head,
    Keys,
    encode_head,
    encode_outs,
    new_stream_id,
    takeover,
    with_ids,
)
from lightserve.httpserver.resume.redis import RedisConnection
from lightserve.httpserver.resume.replay import Replay
from lightserve.httpserver.resume.stream_log import StreamLog
from lightserve.messages.output import StrOut
from lightserve.messages.step import Token
from test.httpserver.resume.test_stream_log import check
from test.waiting import DEADLINE_S, until

HEAD = Head("owner", "/v1/completions", "r1", [7], 0.0, b": keep-alive\n\n")
DEAD = b"dead"  # the token of a process that has no lease
LONG = 5000  # entries: more than some pages, and 0.5 s for a parser that takes quadratic time


class Stream:
    """A stream in Redis, of a process that is dead."""

    def __init__(self, redis: RedisConnection) -> None:
        self.id = new_stream_id()
        self.keys = Keys.of(self.id)
        self.redis = redis
        self.continued: list[tuple[Head, bytes, ResumedStream]] = []
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # of the request that goes on

    async def write(self, count: int, head: Head = HEAD) -> None:
        """So many entries of one token each."""
        known = (b"HSET", self.keys.head, b"head", encode_head(head), b"body", b"{}", b"process", DEAD)
        await self.redis.call(known, *[self.entry(number) for number in range(1, count + 1)])

    def entry(self, number: int) -> tuple[bytes, ...]:
        outs = encode_outs([(0, StrOut(1, "a", Token(number)))])
        events, _ = with_ids(b"data: %d\n\n" % number, self.id, number - 1)
        return (b"XADD", self.keys.events, b"%d-0" % number, b"outs", outs, b"events", events)

    async def follow(self, stream_log: StreamLog, after: int) -> Replay:
        def start_again(head: Head, body: bytes, logged: ResumedStream) -> asyncio.Future[int]:
            self.continued.append((head, body, logged))
            return self.status

        replay = await Replay.connect(stream_log, f"{self.id.decode()}.{after}", start_again)
        await replay.open(HEAD.owner, HEAD.path)
        return replay

    async def process(self) -> bytes:
        (process,) = await self.redis.call((b"HGET", self.keys.head, b"process"))
        assert isinstance(process, bytes)
        return process


def check_stream(folder: Path, scenario: Callable[[StreamLog, Stream], Awaitable[None]]) -> None:
    async def run(stream_log: StreamLog, redis: RedisConnection) -> None:
        await scenario(stream_log, Stream(redis))

    check(folder, run)


async def read_all(replay: Replay) -> bytes:
    return b"".join([events async for events in replay.generator])


def test_a_long_stream_is_taken_over_with_all_its_tokens(tmp_path: Path) -> None:
    async def scenario(stream_log: StreamLog, stream: Stream) -> None:
        await stream.write(LONG)
        replay = await stream.follow(stream_log, LONG - 3)
        reading = asyncio.create_task(read_all(replay))

        await until(lambda: bool(stream.continued))
        end = (b"XADD", stream.keys.events, b"%d-1" % LONG, b"outs", encode_outs([]))
        await stream.redis.call(end)
        events = await reading

        (head, body, logged) = stream.continued[0]
        assert (head, body) == (HEAD, b"{}")
        assert [out.token.id for _, out in logged.sent_outs] == list(range(1, LONG + 1))
        assert await stream.process() == stream_log.token
        assert events.count(b"data: ") == 3
        assert stream_log.counts.taken_over == 1

    check_stream(tmp_path, scenario)


def test_a_stream_that_cannot_be_read_stays_with_its_process(tmp_path: Path) -> None:
    async def scenario(stream_log: StreamLog, stream: Stream) -> None:
        await stream.write(3)
        await stream.redis.call(
            (b"XADD", stream.keys.events, b"4-0", b"outs", b"no msgpack", b"events", b"data: 4\n\n")
        )

        with pytest.raises(msgspec.DecodeError):
            await read_all(await stream.follow(stream_log, 1))

        assert await stream.process() == DEAD
        assert not stream.continued

    check_stream(tmp_path, scenario)


def test_of_two_processes_that_want_a_stream_one_gets_it(tmp_path: Path) -> None:
    async def scenario(stream_log: StreamLog, stream: Stream) -> None:
        await stream.write(300)
        other = StreamLog(f"redis://{stream_log.address.name}", 60.0)
        replays = [await stream.follow(one, 300) for one in (stream_log, other)]

        await asyncio.gather(*[replay._take_over() for replay in replays])

        assert len(stream.continued) == 1
        assert stream_log.counts.taken_over + other.counts.taken_over == 1
        assert await stream.process() == (stream_log.token if stream_log.counts.taken_over else other.token)
        for replay in replays:
            replay.close()

    check_stream(tmp_path, scenario)


def test_a_stream_is_not_taken_from_a_process_that_lives(tmp_path: Path) -> None:
    async def scenario(stream_log: StreamLog, stream: Stream) -> None:
        await stream.write(2)
        late, unknown = takeover(stream.keys, b"1-0", DEAD, b"mine"), takeover(stream.keys, b"2-0", b"x", b"mine")
        now = takeover(stream.keys, b"2-0", DEAD, b"mine")
        lease = PROCESS_PREFIX + DEAD

        replies = await stream.redis.call(late, unknown, (b"SET", lease, 1), now, (b"DEL", lease), now, now)

        assert replies == [0, 0, b"OK", 0, 1, 1, 0]
        assert await stream.process() == b"mine"

    check_stream(tmp_path, scenario)


def test_several_sequences_go_on_unless_the_client_has_more_than_the_stream_log(tmp_path: Path) -> None:
    async def scenario(stream_log: StreamLog, stream: Stream) -> None:
        await stream.write(3, msgspec.structs.replace(HEAD, seeds=[7, 8]))

        with pytest.raises(StreamGoneError, match="the stream log does not have all events"):
            await stream.follow(stream_log, 4)
        replay = await stream.follow(stream_log, 3)
        await replay._take_over()

        assert len(stream.continued) == 1
        replay.close()

    check_stream(tmp_path, scenario)


def test_a_stream_without_an_event_in_the_stream_log_can_go_on(tmp_path: Path) -> None:
    """The stream log is some milliseconds behind: its process died before it was written."""

    async def scenario(stream_log: StreamLog, stream: Stream) -> None:
        await stream.write(0)
        replay = await stream.follow(stream_log, 2)

        await replay._take_over()

        assert stream.continued[0][2].sent_outs == []
        replay.close()

    check_stream(tmp_path, scenario)


def test_a_stream_that_cannot_go_on_here_is_left_to_other_servers(tmp_path: Path) -> None:
    async def scenario(stream_log: StreamLog, stream: Stream) -> None:
        await stream.write(3)
        stream.status.set_result(503)

        with pytest.raises(
            UnavailableError, match="cannot go on with the stream: status 503; come back to another one"
        ):
            await read_all(await stream.follow(stream_log, 1))

        assert len(stream.continued) == 1

    check_stream(tmp_path, scenario)


def test_a_stream_is_given_back_if_redis_does_not_say_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(stream_log: StreamLog, stream: Stream) -> None:
        await stream.write(3)
        replay = await stream.follow(stream_log, 3)
        call = replay._connection.call

        async def lose_reply(*commands: object) -> None:
            await call(*commands)  # type: ignore[arg-type]
            raise ConnectionResetError("the network is down")

        monkeypatch.setattr(replay._connection, "call", lose_reply)
        with pytest.raises(UnavailableError):
            await replay._take(b"3-0")

        async with asyncio.timeout(DEADLINE_S):
            while await stream.process():  # noqa: ASYNC110  Redis has no event
                await asyncio.sleep(0.001)
        replay.close()

    check_stream(tmp_path, scenario)


def test_a_replay_that_waits_reads_nothing_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_MS", 10)

    async def scenario(stream_log: StreamLog, stream: Stream) -> None:
        await stream.write(3)
        await stream.redis.call((b"HSET", stream.keys.head, b"process", stream_log.token, b"body", b"x" * 2**20))
        reading = asyncio.create_task(read_all(await stream.follow(stream_log, 1)))

        async with asyncio.timeout(DEADLINE_S):
            while await calls_of(stream.redis, b"cmdstat_hget") < 5:  # noqa: ASYNC110  Redis has no event
                await asyncio.sleep(0.001)
        reading.cancel()

        (stats,) = await stream.redis.call((b"INFO", b"stats"))
        sent = int(stats.partition(b"total_net_output_bytes:")[2].partition(b"\r\n")[0])
        assert sent < 2**20

    check_stream(tmp_path, scenario)


async def calls_of(redis: RedisConnection, name: bytes) -> int:
    (stats,) = await redis.call((b"INFO", b"commandstats"))
    return int(stats.partition(name + b":calls=")[2].partition(b",")[0] or 0)
