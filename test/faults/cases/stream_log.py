"""Resumed streams: Redis is away or hangs, a server dies and another one goes on, or a client of one server is cut."""

from __future__ import annotations

import shutil
import signal

import psutil

from test.api.event_client import Event, EventClient
from test.api.server import ServerProcess
from test.api.test_faults import COMPLETE
from test.faults.case import Case
from test.faults.harness import STREAMING, FaultContext
from test.faults.reactions import Reaction, same_text, streams_continue
from test.faults.start_case import Start, StartCase
from test.waiting import wait_until
from test.worker.kv.block_store.redis_server import redis_server

NO_REDIS = ("--null_step_ms", "5", "--stream_log", "redis://127.0.0.1:1")  # nobody listens on this port
RESUMABLE = {"X-Resumable-Stream": "1"}
TOKENS = 400  # of 5 ms each: some seconds
BODY = {"prompt": [501, 502, 503], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}


def serve_without_redis(context: FaultContext) -> None:
    for i in range(4):
        context.complete_text({"prompt": [100 * i + 100], "max_tokens": 4})


def _lost_streams_counted(context: FaultContext) -> None:
    streams_continue(context)
    context.wait_until(lambda: context.server.metrics()["resumable_streams_lost_total"] >= len(context.streams))


def launch(start: Start, redis: str) -> ServerProcess:
    server = start.launch("--null_step_ms", "5", "--stream_log", f"redis://{redis}")
    start.check_serves(server)
    return server


def text_of(events: list[Event]) -> str:
    return "".join(event.json["choices"][0]["text"] for event in events if event.data != "[DONE]")


def redis_gets(number: signal.Signals, start: Start) -> None:
    """A stream runs while Redis gets a signal."""
    with redis_server(start.base) as redis:
        server = launch(start, redis)
        client = EventClient(server.url, COMPLETE, BODY)
        client.read(20)
        next(one for one in psutil.Process().children() if redis in " ".join(one.cmdline())).send_signal(number)
        broken = client.read_all()
        whole = EventClient(server.url, COMPLETE, BODY).read_all()

        assert text_of(broken) == text_of(whole)
        wait_until(lambda: server.metrics()["resumable_streams_lost_total"] >= 1)
        assert server.stop() == 0


def kill_server(start: Start) -> None:
    with redis_server(start.base) as redis:
        server = launch(start, redis)
        client = EventClient(server.url, COMPLETE, BODY)
        client.read(20)
        server.process.kill()
        client.read_until_cut()
        check_resumes(client, launch(start, redis))


def kill_http_process(start: Start) -> None:
    with redis_server(start.base) as redis:
        server = launch(start, redis)
        client = EventClient(server.url, COMPLETE, BODY)
        client.read(20)
        server.processes()["ls-httpserver"][0].kill()
        client.read_until_cut()
        check_resumes(client, server)


def check_resumes(client: EventClient, server: ServerProcess) -> None:
    """The client gets the rest of its stream from this server."""
    found = client.events + EventClient(server.url, COMPLETE, {}, client.last_id).read_all()
    whole = EventClient(server.url, COMPLETE, BODY).read_all()

    assert len(client.events) < len(whole)
    assert text_of(found) == text_of(whole)
    assert server.stop() == 0


def come_back_without_redis(start: Start) -> None:
    """A client that asked for it leaves, and comes back by a new connection, perhaps to the other HTTP process."""
    server = start.launch("--null_step_ms", "5", "--httpserver_workers", "2")
    start.check_serves(server)
    client = EventClient(server.url, COMPLETE, BODY, **RESUMABLE)
    client.read(20)
    client.close()
    for _ in range(4):
        rest = EventClient(server.url, COMPLETE, {}, client.last_id, **RESUMABLE).read_all()
        whole = EventClient(server.url, COMPLETE, BODY).read_all()
        assert text_of(client.events + rest) == text_of(whole)
    assert server.stop() == 0


def kill_http_process_without_redis(start: Start) -> None:
    """What the dead process had sent can still be read; then the response ends without the end marker."""
    server = start.launch("--null_step_ms", "5", "--httpserver_workers", "1")
    start.check_serves(server)
    client = EventClient(server.url, COMPLETE, BODY, **RESUMABLE)
    client.read(20)
    server.processes()["ls-httpserver"][0].kill()
    wait_until(lambda: "ls-httpserver" in server.processes() and server.is_healthy())
    rest = EventClient(server.url, COMPLETE, {}, client.events[0].id, **RESUMABLE).read_all()

    assert text_of(rest).startswith(text_of(client.events[1:]))
    assert "[DONE]" not in [event.data for event in rest]
    assert server.stop() == 0


CASES = [
    Case(
        "the Redis of --stream_log is away, streaming",
        serve_without_redis,
        Reaction("streams go on; those without a stream log are counted", _lost_streams_counted, same_text),
        STREAMING,
        NO_REDIS,
        20.0,
    )
]
START_CASES: list[StartCase] = [
    StartCase(
        "a client with X-Resumable-Stream is cut off",
        come_back_without_redis,
        "it comes back and gets the rest, same text",
        60.0,
        is_long=False,
    ),
    StartCase(
        "kill -9 ls-httpserver with X-Resumable-Stream",
        kill_http_process_without_redis,
        "the client comes back and gets what was sent",
        60.0,
    ),
]
if shutil.which("redis-server"):
    GO_ON = "the stream goes on without the stream log, same text"
    START_CASES += [
        StartCase("the Redis of --stream_log hangs", lambda start: redis_gets(signal.SIGSTOP, start), GO_ON, 60.0),
        StartCase("kill -9 the Redis of --stream_log", lambda start: redis_gets(signal.SIGKILL, start), GO_ON, 60.0),
        StartCase(
            "kill -9 a server with --stream_log",
            kill_server,
            "the client comes back to another server and gets the rest, same text",
            90.0,
        ),
        StartCase(
            "kill -9 ls-httpserver with --stream_log",
            kill_http_process,
            "the client comes back to the server and gets the rest, same text",
            90.0,
        ),
    ]
