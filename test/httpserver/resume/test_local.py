"""Streams that are resumed on one server without Redis."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightserve.config import HttpConfig
from lightserve.errors import StreamNotFoundError
from lightserve.httpserver.resume import local
from lightserve.httpserver.resume.local import LocalRecorder, LocalReplay, LocalStreams
from test.httpserver.app_client import Served, served
from test.httpserver.fake_engine import spell
from test.waiting import until, wait_until

PATH = "/v1/completions"
BODY = {"prompt": [1, 2], "stream": True}
RESUMABLE = {"X-Resumable-Stream": "1"}
KEYED = HttpConfig(api_key=["first", "second"])
EVENT = b"data: {}\n\n"


def of_key(key: str, **others: str) -> dict[str, str]:
    return (
        RESUMABLE | {"Authorization": f"Bearer {key}"} | {name.replace("_", "-"): text for name, text in others.items()}
    )


async def stream(server: Served, key: str = "first") -> list[str]:
    """The events of a stream that can be resumed, each with its id."""
    response = await server.post(PATH, json=BODY, headers=of_key(key))
    return [event for event in response.text.split("\n\n") if event]


def id_of(event: str) -> str:
    found = re.search(r"^id: (.*)$", event, flags=re.MULTILINE)
    assert found, event
    return found[1]


def run(tmp_path: Path, ask: Any) -> Any:
    async def go() -> Any:
        async with served(tmp_path, KEYED, spell("hello")) as server:
            return await ask(server)

    return asyncio.run(go())


def test_a_client_gets_the_events_after_its_last_one(tmp_path: Path) -> None:
    async def ask(server: Served) -> tuple[list[str], str]:
        events = await stream(server)
        response = await server.post(PATH, json={}, headers=of_key("first", last_event_id=id_of(events[1])))
        assert response.headers["content-type"].startswith("text/event-stream")
        return events, response.text

    events, rest = run(tmp_path, ask)

    assert len(events) > 4
    assert rest == "".join([f"{event}\n\n" for event in events[2:]])


def test_without_the_header_events_have_no_ids(tmp_path: Path) -> None:
    async def ask(server: Served) -> str:
        response = await server.post(PATH, json=BODY, headers={"Authorization": "Bearer first"})
        return str(response.text)

    assert "\nid: " not in run(tmp_path, ask)


@pytest.mark.parametrize(
    ("key", "path", "change"),
    [("second", PATH, ""), ("first", "/v1/chat/completions", ""), ("first", PATH, "A"), ("first", PATH, "../x")],
)
@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_only_its_client_gets_a_stream(tmp_path: Path, key: str, path: str, change: str, method: str) -> None:
    async def ask(server: Served) -> tuple[int, str, int]:
        event_id = id_of((await stream(server))[0])
        shown = change + event_id[len(change) :]
        refused = await server.http.request(method, path, headers=of_key(key, last_event_id=shown))
        again = await server.post(PATH, json={}, headers=of_key("first", last_event_id=event_id))
        return refused.status_code, refused.json()["error"]["code"], again.status_code

    assert run(tmp_path, ask) == (404, "stream_not_found", 200)


def test_delete_ends_a_stream(tmp_path: Path) -> None:
    async def ask(server: Served) -> list[int]:
        headers = of_key("first", last_event_id=id_of((await stream(server))[0]))
        ended = await server.http.request("DELETE", PATH, headers=headers)
        return [ended.status_code, (await server.post(PATH, json={}, headers=headers)).status_code]

    assert run(tmp_path, ask) == [204, 404]


# without a server


def recorder(streams: LocalStreams) -> LocalRecorder:
    made = LocalRecorder(streams, "owner", PATH)
    made.begin(None, b"")  # type: ignore[arg-type]  # the generation is not looked at
    return made


def event_id(events: bytes) -> str:
    return id_of(events.decode().split("\n\n")[0])


async def read_all(replay: LocalReplay, seen: list[bytes]) -> None:
    async for events in replay.generator:
        seen.append(events)


def files(folder: Path) -> Sequence[str]:
    return os.listdir(folder)


def test_a_reader_follows_a_stream_until_its_writer_ends(tmp_path: Path) -> None:
    async def go() -> list[bytes]:
        writer = recorder(streams := LocalStreams(tmp_path, 60))
        first = writer.add([], EVENT)
        seen: list[bytes] = []
        reading = asyncio.create_task(read_all(LocalReplay(streams, event_id(first), "owner", PATH, b""), seen))
        second = writer.add([], EVENT * 2)
        await until(lambda: second in seen)
        assert not reading.done()
        last = writer.end(EVENT)
        writer.close()
        await asyncio.wait_for(reading, 60)
        return [b"".join(seen), second + last]

    seen, expected = asyncio.run(go())

    assert seen == expected


def test_a_stream_whose_client_is_gone_runs_on_until_it_ends_or_is_stopped(tmp_path: Path) -> None:
    async def go() -> None:
        streams = LocalStreams(tmp_path, 60)
        for end in ("ends", "stops"):
            writer = recorder(streams)
            first = writer.add([], EVENT)
            sending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting = asyncio.create_task(writer.wait_for_reconnect(sending))
            await asyncio.sleep(0)
            assert not waiting.done()
            if end == "ends":
                sending.set_result(None)
            else:
                streams.stop(event_id(first), "owner", PATH)
            await asyncio.wait_for(waiting, 60)
            writer.close()

    asyncio.run(go())


def test_a_client_that_does_not_come_back_ends_its_stream(tmp_path: Path) -> None:
    async def go() -> None:
        writer = recorder(LocalStreams(tmp_path, 0.1))
        sending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await asyncio.wait_for(writer.wait_for_reconnect(sending), 60)
        writer.close()

    asyncio.run(go())

    assert files(tmp_path) == []


def test_streams_that_expired_are_removed_and_running_ones_stay(tmp_path: Path) -> None:
    streams = LocalStreams(tmp_path, 0.01)
    ended, running = recorder(streams), recorder(streams)
    ended.close()

    wait_until(lambda: streams.has_room() and len(files(tmp_path)) == 1)

    assert running.add([], EVENT) != EVENT
    running.close()


def test_a_stream_that_is_too_long_goes_on_without_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_STREAM_BYTES", 500)
    writer = recorder(streams := LocalStreams(tmp_path, 60))
    first = writer.add([], EVENT)
    for _ in range(20):
        writer.add([], EVENT)

    assert writer.add([], EVENT) == EVENT
    with pytest.raises(StreamNotFoundError):
        LocalReplay(streams, event_id(first), "owner", PATH, b"")
    assert files(tmp_path) == []


def test_no_more_streams_are_kept_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_BYTES", 10)
    streams = LocalStreams(tmp_path, 60)
    first, second = recorder(streams), recorder(streams)

    assert first.add([], EVENT) != EVENT
    assert second.add([], EVENT) == EVENT
    first.close()
