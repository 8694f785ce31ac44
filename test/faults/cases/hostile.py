"""Requests and chat templates that try to take memory, time, or what belongs to others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightserve.httpserver.tracing.exporter import has_otlp
from test.api.hostile_bodies import HOSTILE, send
from test.api.test_faults import CHAT, GET, HI, POST, Client, http_request, leave
from test.faults.case import Case
from test.faults.cases.observability import FLAGS as TRACED
from test.faults.cases.pooling import EMBED
from test.faults.harness import STREAMING, FaultContext
from test.faults.reactions import STREAMS_CONTINUE, Reaction, responds
from test.faults.start_case import Start, StartCase
from test.model_files.hostile_templates import LARGE_VALUES, STEPS

MIB = 2**20
SLOW_EMBEDDINGS = ("--task", "embed", "--null_step_ms", "50", "--batch_max_tokens", "64")
TEXTS = [[1000 + i] * 200 for i in range(600)]  # a minute and a half in steps of 64 tokens
READ_PATHS = (b"/", b"/v1/models", b"/metrics", b"/health", b"/debug/requests", b"/v1/responses/resp_1", b"/nothing")
FOREIGN = b"Host: evil.example:8000"


@contextmanager
def http_memory_grows_by(context: FaultContext, limit: int) -> Iterator[None]:
    """The HTTP process does not grow by more than this."""
    http = context.server.processes()["ls-httpserver"][0]
    before = http.memory_info().rss
    yield
    assert http.memory_info().rss - before < limit


def send_long_names(context: FaultContext) -> None:
    """Names of 200 MB; as much freed memory as one request takes may stay with the allocator."""
    send(context.client, "unknown field", -1, 10 * MIB)
    with http_memory_grows_by(context, 64 * MIB):
        context.statuses += [send(context.client, "unknown field", i, 10 * MIB)[0] for i in range(20)]


def send_long_values(context: FaultContext) -> None:
    for kind in HOSTILE:
        context.statuses += [send(context.client, kind, i, MIB)[0] for i in range(3)]


def _refused_or_served(context: FaultContext) -> None:
    assert max(context.statuses) < 500, context.statuses
    STREAMS_CONTINUE.wait(context)


def come_from_a_foreign_page(context: FaultContext) -> None:
    """A page whose name was made to resolve to this machine (DNS rebinding)."""
    requests = [http_request(b"GET %s HTTP/1.1" % path, FOREIGN) for path in READ_PATHS]
    body = json.dumps({"prompt": "Hi", "max_tokens": 2}).encode()
    requests.append(http_request(POST, FOREIGN, b"Content-Length: %d" % len(body), body=body))
    for data in requests:
        response = context.client.raw(data)
        assert b"--allowed_hosts" in response
        context.statuses.append(int(response.split()[1]))
    assert context.client.raw(http_request(GET, b"Host: localhost")).startswith(b"HTTP/1.1 200 ")


def leave_embeddings(context: FaultContext) -> None:
    body = json.dumps({"input": TEXTS, "dimensions": 2}).encode()
    for abruptly in (False, True):
        sock = context.open()
        sock.sendall(http_request(b"POST %s HTTP/1.1" % EMBED.encode(), b"Content-Length: %d" % len(body), body=body))
        context.wait_until(lambda: context.load() > 0)
        leave(sock, abruptly)


def _router_is_idle(context: FaultContext) -> None:
    context.wait_until(lambda: context.load() == 0 and context.requests_in_router() == 0)


def flood_routes(context: FaultContext) -> None:
    """Paths of 48 MB, each of which is different, while spans cannot be sent."""
    with http_memory_grows_by(context, 16 * MIB):
        context.statuses += [send(context.client, "route", i, 40_000)[0] for i in range(1200)]


def hostile_template(template: str) -> Callable[[Start], None]:
    def check(start: Start) -> None:
        path = start.base / "template.jinja"
        path.write_text(template)
        server = start.launch("--chat_template", str(path))
        start.check_serves(server)
        client = Client(server)
        status, response = client.post(CHAT, {"messages": HI, "max_tokens": 1})
        assert status == 400, response
        assert "template" in str(response)
        assert client.golden()
        client.close()
        assert server.stop() == 0

    return check


CASES = [
    Case("fields with names of 10 MB", send_long_names, responds(200), within_s=60.0, is_long=True),
    Case(
        "long strings in every field",
        send_long_values,
        Reaction("400 or served; streams go on, same text", _refused_or_served, STREAMS_CONTINUE.verify),
        during=STREAMING,
        within_s=60.0,
        is_long=True,
    ),
    Case("a page that resolves to this machine", come_from_a_foreign_page, responds(403)),
    Case(
        "clients leave 600 embeddings",
        leave_embeddings,
        Reaction("aborted", _router_is_idle),
        flags=SLOW_EMBEDDINGS,
        is_long=True,
    ),
]
if has_otlp():
    CASES.append(
        Case(
            "a flood of routes, with traces",
            flood_routes,
            responds(404),
            is_long=True,
            flags=TRACED,
            within_s=60.0,
        )
    )
START_CASES = [
    StartCase("a chat template that takes memory", hostile_template(LARGE_VALUES[0]), "400 for chats; others served"),
    StartCase("a chat template that never ends", hostile_template(STEPS[0]), "400 for chats; others served", 60.0),
]
