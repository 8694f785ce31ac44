"""--stream_log: the server that generates a stream dies, and another one goes on with the same text."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightserve.httpserver.resume.records import Entry, Keys, decode_head
from lightserve.httpserver.resume.redis import RedisConnection
from lightserve.links.keys import generate
from lightserve.utils.net import parse_redis
from test.api.event_client import Event, EventClient
from test.api.server import START_S, STOP_S, ServerProcess, start_server
from test.api.test_dp import KV_TOKENS, PROMPT, model
from test.api.test_engines import CLI, serving
from test.api.test_restart import NUMBERS
from test.api.test_stream_log import APIS, BODY, COMPLETE, serve, texts
from test.ports import free_port
from test.waiting import wait_until
from test.worker.kv.block_store.redis_server import redis_server

pytestmark = pytest.mark.slow

__all__ = ["model"]  # a fixture

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 5, "top_k": 30, "repetition_penalty": 1.1, "logprobs": 2},
    {"temperature": 1.0, "seed": 3, "guided_json": NUMBERS},
    {"temperature": 1.0, "stream_options": {"include_usage": True}},  # it gets a seed
]
SAMPLED = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
SEVERAL: dict[str, tuple[str, dict[str, Any]]] = {
    "choices": (COMPLETE, BODY | {"n": 2}),
    "prompts": (COMPLETE, BODY | {"prompt": [[2000], [4000]], "stop_token_ids": [2005]}),  # the first has five tokens
    "ahead": (COMPLETE, BODY | {"n": 2}),
}
CUT_AT = 20  # events


def joined(events: list[Event]) -> list[Any]:
    """Text, logprobs and ends of a completion, and its usage."""
    chunks = [event.json for event in events if event.data != "[DONE]"]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    ends = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    for usage in ends:
        del usage["prompt_tokens_details"]  # what was cached depends on what came before
    return ["".join(choice["text"] for choice in choices), [choice["logprobs"] for choice in choices], ends]


def numbers(events: list[Event]) -> list[int]:
    return [int((event.id or "").rpartition(".")[2]) for event in events]


@dataclass
class Pair:
    """Two servers with one stream log, of which the first was killed in the middle of these streams."""

    survivor: ServerProcess
    whole: dict[str, list[Event]]  # by API: what the survivor sends for the same requests
    cut: dict[str, EventClient]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    requests = APIS | SEVERAL
    with redis_server(folder) as address, serve(folder / "second", "--stream_log", f"redis://{address}") as survivor:
        whole = {api: EventClient(survivor.url, path, body).read_all() for api, (path, body) in requests.items()}
        with serve(folder / "first", "--stream_log", f"redis://{address}") as server:
            cut = {api: EventClient(server.url, path, body) for api, (path, body) in requests.items()}
            for client in cut.values():
                client.read(CUT_AT)
                wait_until(lambda client=client: last_number(address, client) >= CUT_AT)  # type: ignore[misc]
            server.process.kill()
            for client in cut.values():
                client.read_until_cut()
        yield Pair(survivor, whole, cut)


@pytest.mark.parametrize("api", APIS)
def test_another_server_goes_on_with_the_stream_of_one_that_was_killed(pair: Pair, api: str) -> None:
    client, whole = pair.cut[api], pair.whole[api]

    resumed = EventClient(pair.survivor.url, APIS[api][0], {}, client.last_id)
    found = client.events + resumed.read_all()

    assert 20 <= len(client.events) < len(whole)
    assert texts(found) == texts(whole)
    assert numbers(found) == list(range(1, len(whole) + 1))
    wait_until(lambda: pair.survivor.metrics()["resumable_streams_taken_over_total"] >= 1)
    wait_until(lambda: pair.survivor.metrics()["num_requests_running"] == 0)


def test_a_client_that_got_an_error_of_a_server_that_ends_can_go_on_elsewhere(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path) as address,
        serve(tmp_path / "second", "--stream_log", f"redis://{address}") as survivor,
    ):
        whole = EventClient(survivor.url, COMPLETE, BODY).read_all()
        with serve(tmp_path / "first", "--stream_log", f"redis://{address}") as server:
            client = EventClient(server.url, COMPLETE, BODY)
            client.read(20)
            server.processes()["ls-router"][0].kill()
            cut = client.read_all()
        *events, error, done = cut
        found = events + EventClient(survivor.url, COMPLETE, {}, events[-1].id).read_all()

        assert "its router died" in error.json["error"]["message"]
        assert (error.id, done.id) == (None, None)
        assert len(events) < len(whole)
        assert texts(found) == texts(whole)


def by_choice(events: list[Event]) -> dict[int, list[tuple[str, str | None]]]:
    """Text and finish reason of every event: which choice is first in a step does not matter."""
    found: dict[int, list[tuple[str, str | None]]] = {}
    for event in events[:-1]:
        (choice,) = event.json["choices"]
        found.setdefault(choice["index"], []).append((choice["text"], choice["finish_reason"]))
    return found


@pytest.mark.parametrize("kind", ["choices", "prompts"])
def test_sequences_of_a_stream_go_on_unless_they_have_ended(pair: Pair, kind: str) -> None:
    events, whole = pair.cut[kind].events[:CUT_AT], pair.whole[kind]
    ended = [index for index, texts in by_choice([*events, whole[-1]]).items() if texts[-1][1] is not None]

    resumed = EventClient(pair.survivor.url, COMPLETE, {}, events[-1].id)
    found = events + resumed.read_all()

    assert ended == ([0] if kind == "prompts" else [])
    assert by_choice(found) == by_choice(whole)
    assert numbers(found) == list(range(1, len(whole) + 1))
    assert found[-1].data == "[DONE]"
    wait_until(lambda: pair.survivor.metrics()["num_requests_running"] == 0)


def test_sequences_of_which_the_client_has_more_than_the_stream_log_do_not_go_on(pair: Pair) -> None:
    """They would go on in another order, and a number would stand for another event."""
    stream = pair.cut["ahead"].last_id.partition(".")[0]

    def resume() -> EventClient:
        return EventClient(pair.survivor.url, COMPLETE, BODY, f"{stream}.1000")

    wait_until(lambda: resume().status == 410)  # the lease of the server ends first

    assert "the stream log does not have all events" in resume().error()["message"]


def test_a_client_gets_the_rest_from_a_server_whose_http_process_died(tmp_path: Path) -> None:
    with redis_server(tmp_path) as address, serve(tmp_path, "--stream_log", f"redis://{address}") as server:
        requests = [APIS["completions"], APIS["responses"]]
        whole = [EventClient(server.url, path, body).read_all() for path, body in requests]
        cut = [EventClient(server.url, path, body, **{"X-Request-Id": "mine"}) for path, body in requests]
        for client in cut:
            client.read(20)

        server.processes()["ls-httpserver"][0].kill()
        for client in cut:
            client.read_until_cut()
        resumed = [  # waits for the next process
            EventClient(server.url, path, {}, client.last_id) for (path, _), client in zip(requests, cut, strict=True)
        ]
        found = [client.events + again.read_all() for client, again in zip(cut, resumed, strict=True)]

        assert all(len(client.events) < len(events) for client, events in zip(cut, whole, strict=True))
        assert [texts(events) for events in found] == [texts(events) for events in whole]
        assert [numbers(events) for events in found] == [list(range(1, len(events) + 1)) for events in whole]
        wait_until(lambda: server.metrics()["resumable_streams_taken_over_total"] == 2)
        created, completed = found[1][0].json["response"], found[1][-1].json["response"]
        assert created["id"] == completed["id"]
        with urllib.request.urlopen(f"{server.url}/v1/responses/{created['id']}") as stored:
            assert json.load(stored)["output"] == completed["output"]


@contextmanager
def cluster(model: Path, folder: Path) -> Iterator[tuple[ServerProcess, ServerProcess, str]]:
    """Two gateways of one engine, and the address of their stream log."""
    generate(folder / "keys")
    address, keys = f"tcp://127.0.0.1:{free_port()}", ("--cluster_keys", str(folder / "keys"))
    flags = ("--deterministic", "--max_total_token_num", KV_TOKENS, "--listen", address)
    with redis_server(folder) as redis, ExitStack() as stack:

        def start(name: str, *command: str) -> ServerProcess:
            process = start_server(folder / name, [*CLI, *command, *keys])
            stack.callback(stop, process)
            return process

        start("engine.log", "engine", str(model), *flags)
        stream_log = ("--engines", address, "--stream_log", f"redis://{redis}", "--port", "0")
        gateways = [start(f"gateway-{number}.log", "serve", str(model), *stream_log) for number in range(2)]
        for gateway in gateways:
            wait_until(lambda gateway=gateway: "ready at" in gateway.log or gateway.has_ended, START_S)  # type: ignore[misc]
            assert not gateway.has_ended, gateway.log
            wait_until(lambda gateway=gateway: serving(gateway) == 1, START_S)  # type: ignore[misc]
        yield gateways[0], gateways[1], redis


def seed_of(redis: str, client: EventClient) -> int:
    """What the stream log says about a stream."""
    return decode_head(call(redis, b"HGET", keys_of(client).head, b"head")).seeds[0]


def last_number(redis: str, client: EventClient) -> int:
    """Of the last event of a stream that the stream log has."""
    found = call(redis, b"XREVRANGE", keys_of(client).events, b"+", b"-", b"COUNT", 1)
    return Entry.of(found[0]).last if found else 0


def keys_of(client: EventClient) -> Keys:
    return Keys.of(client.last_id.partition(".")[0].encode())


def call(redis: str, *command: bytes | int) -> Any:
    async def send() -> Any:
        connection = await RedisConnection.open(parse_redis(f"redis://{redis}"))
        (found,) = await connection.call(command)
        connection.close()
        return found

    return asyncio.run(send())


def stop(process: ServerProcess) -> None:
    if not process.has_ended:
        process.process.kill()  # its child processes exit too
        process.process.wait(STOP_S)


def test_another_gateway_goes_on_with_the_streams_of_one_that_was_killed(model: Path, tmp_path: Path) -> None:
    with cluster(model, tmp_path) as (gateway, survivor, redis):
        bodies = [SAMPLED | kind for kind in KINDS]
        clients = [EventClient(gateway.url, COMPLETE, body) for body in bodies]
        for client in clients:
            client.read(20)
        gateway.process.kill()
        for client in clients:
            client.read_until_cut()
        resumed = [EventClient(survivor.url, COMPLETE, {}, client.last_id) for client in clients]
        found = [client.events + again.read_all() for client, again in zip(clients, resumed, strict=True)]
        seeds = [seed_of(redis, client) for client in clients]
        bodies = [body | {"seed": seed} for body, seed in zip(bodies, seeds, strict=True)]
        whole = [EventClient(survivor.url, COMPLETE, body).read_all() for body in bodies]

        assert seeds[:2] == [5, 3]
        assert [joined(events) for events in found] == [joined(events) for events in whole]
        assert [numbers(events) for events in found] == [list(range(1, len(events) + 1)) for events in whole]
        assert any(len(client.events) < len(events) for client, events in zip(clients, whole, strict=True))
        wait_until(lambda: survivor.metrics()["resumable_streams_taken_over_total"] > 0)
