"""Clients that disconnect, stall, send invalid data or come in large numbers."""

from __future__ import annotations

import contextlib
import ctypes
import json
import resource
import select
import socket
import struct
import sys
from typing import Any

import psutil

from test.api.test_faults import BODIES, EVERY_BODY, GET, POST, RAW, generate, http_request, leave, read_until
from test.faults.case import Case
from test.faults.harness import STREAMING, FaultContext
from test.faults.reactions import ABORTED, OTHERS_SERVED, STREAMS_CONTINUE, Reaction, responds
from test.waiting import wait_until

SPARE_DESCRIPTORS = 30
SO_ATTACH_FILTER, BPF_RETURN = 26, 0x06  # Linux: a BPF filter for every packet of a socket


def status_of(sock: socket.socket) -> int:
    """The status of the next response; 0 if the server closed the connection instead."""
    with contextlib.suppress(ConnectionResetError):
        head = sock.recv(65536)
        return int(head.split()[1]) if head else 0
    return 0


# disconnects


def two_long_responses(context: FaultContext) -> dict[str, Any]:
    prompt = context.running.engine.ids([501] * 20)
    return {"prompt": prompt, "n": 2, "max_tokens": context.longest_response(len(prompt))}


def leave_before_the_first_token(context: FaultContext) -> None:
    for abruptly in (False, True):
        for is_streamed in (False, True):
            sock = context.open()
            sock.sendall(generate(stream=is_streamed, **two_long_responses(context)))
            leave(sock, abruptly)


def leave_in_the_middle(context: FaultContext) -> None:
    for abruptly in (False, True):
        sock = context.open()
        sock.sendall(generate(stream=True, **two_long_responses(context)))
        read_until(sock, b"data: ")
        leave(sock, abruptly)


def leave_ollamas_stream(context: FaultContext) -> None:
    fields = {"prompt": "Once", "raw": True, "ignore_eos": True}
    body = json.dumps(fields | {"options": {"num_predict": context.longest_response(20)}}).encode()
    for abruptly in (False, True):
        sock = context.open()
        sock.sendall(http_request(b"POST /api/generate HTTP/1.1", b"Content-Length: %d" % len(body), body=body))
        read_until(sock, b'"done":false')
        leave(sock, abruptly)


def leave_after_the_last_token(context: FaultContext) -> None:
    for abruptly in (False, True):
        sock = context.open()
        sock.sendall(generate(stream=True, max_tokens=2))
        read_until(sock, b'"finish_reason":"length"')
        leave(sock, abruptly)


def leave_while_others_stream(context: FaultContext) -> None:
    for _ in range(20):
        leave_in_the_middle(context)


def lose_power(context: FaultContext) -> None:
    """Half-open connections: the clients' machines lost power. One client waits, one receives a stream."""
    for is_streamed in (False, True):
        sock = context.open()
        sock.sendall(generate(stream=is_streamed, **two_long_responses(context)))
        if is_streamed:
            read_until(sock, b"data: ")
        drop_packets(sock)


def drop_packets(sock: socket.socket) -> None:
    """From now on the kernel drops all packets for this socket and acknowledges nothing."""
    drop = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(drop)))


# stalls


def read_nothing(context: FaultContext) -> None:
    """The slowest possible reader: its receive buffer is small, and it never reads."""
    sock = context.exits.enter_context(socket.socket())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((context.client.place.hostname, context.client.place.port))
    sock.sendall(generate(stream=True, n=64, max_tokens=8000))


def _cut_off(context: FaultContext) -> None:
    """Memory stays bounded, others are served, and in the end the request is aborted."""
    http = context.server.processes()["ls-httpserver"][0]
    before = http.memory_info().rss
    others = [context.complete_text({"prompt": [501, 502, 503], "max_tokens": 4}) for _ in range(20)]
    ABORTED.wait(context)
    assert len(set(others)) == 1
    assert http.memory_info().rss - before < 64 * 2**20


def stall_in_the_head(context: FaultContext) -> None:
    for index in range(200):
        context.open().sendall(GET[: 1 + index % len(GET)])


def stall_everywhere(context: FaultContext) -> None:
    """Stall in headers, in bodies shorter than their Content-Length, and in chunked bodies."""
    starts = [GET, b"GET /health HTTP/1.1\r\nX: ", POST + b"\r\nContent-Length: 100\r\n\r\n{"]
    starts += [POST + b'\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"pro\r\n']
    socks = []
    for start in starts * 25:
        socks.append(context.open())
        socks[-1].sendall(start)
    assert context.health() == 200
    context.statuses += [status_of(sock) for sock in socks]


# invalid data


def send_bad_bodies(context: FaultContext) -> None:
    context.statuses += [context.client.post(path, body)[0] for path in EVERY_BODY for body in BODIES]


def send_bad_http(context: FaultContext) -> None:
    wrong = [
        (status, data[:80], response[:80])
        for status, data in RAW
        if not (response := context.client.raw(data)).startswith(b"HTTP/1.1 %d " % status)
    ]
    assert not wrong, wrong


def send_a_huge_header(context: FaultContext) -> None:
    """Send 100 MB, or less if the server refuses earlier."""
    sock = context.open()
    sock.sendall(GET + b"\r\nX: ")
    for _ in range(100):
        if select.select([sock], [], [], 0)[0]:
            break
        sock.sendall(b"x" * 2**20)
    context.statuses.append(status_of(sock))


def send_huge_request_ids(context: FaultContext) -> None:
    for length, status in ((129, 200), (10_000, 200), (10**6, 431)):
        response = context.client.raw(http_request(GET, b"X-Request-Id: " + b"x" * length))
        assert response.startswith(b"HTTP/1.1 %d " % status), response[:100]
        assert b"x" * 129 not in response


def use_one_request_id_twice(context: FaultContext) -> None:
    """The responses stay separate, and one abort ends both."""
    named = [context.stream(prompt=[100 * i], max_tokens=20, request_id="twin") for i in (1, 2)]
    for stream in named:
        stream.read_all()
        assert stream.is_complete
        assert stream.text == context.complete_text({**stream.body, "request_id": "other"})
    longer = [context.stream(max_tokens=context.longest_response(), request_id="twin") for _ in range(2)]
    for stream in longer:
        stream.read_events(1)
    context.client.post("/abort_request", {"request_id": "twin"})
    assert all(b"request_aborted" in stream.read_all() for stream in longer)


# many connections


def storm(context: FaultContext) -> None:
    """Connections that open and close without data, and some with random bytes."""
    for index in range(2000):
        with context.client.open() as sock:
            if index % 10 == 0:
                sock.sendall(context.random.randbytes(20))


def pipeline(context: FaultContext) -> None:
    count = 1000
    once = GET + b"\r\nHost: localhost\r\n\r\n"
    response = context.client.raw(once * (count - 1) + http_request(GET, b"Host: localhost"))
    assert response.count(b"HTTP/1.1 200 ") == count


def open_many(context: FaultContext) -> None:
    """Open ten thousand connections, or as many as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    context.exits.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    for _ in range(min(10_000, hard - 1000)):
        context.open()


def run_out_of_descriptors(context: FaultContext) -> None:
    """The HTTP process may open thirty more descriptors; a hundred connections come."""
    http = context.server.processes()["ls-httpserver"][0]
    limits = http.rlimit(psutil.RLIMIT_NOFILE)
    http.rlimit(psutil.RLIMIT_NOFILE, (http.num_fds() + SPARE_DESCRIPTORS, limits[1]))
    socks = [context.open() for _ in range(100)]
    wait_until(lambda: http.num_fds() >= http.rlimit(psutil.RLIMIT_NOFILE)[0] - 1)
    for sock in socks:
        sock.close()
    http.rlimit(psutil.RLIMIT_NOFILE, limits)


CASES = [
    Case("clients leave before the first token", leave_before_the_first_token, ABORTED),
    Case("clients leave in the middle", leave_in_the_middle, ABORTED),
    Case("clients leave a stream of Ollama's API", leave_ollamas_stream, ABORTED),
    Case("clients leave before [DONE]", leave_after_the_last_token, ABORTED),
    Case(
        "clients leave while others stream", leave_while_others_stream, STREAMS_CONTINUE, during=STREAMING, is_long=True
    ),
    Case("200 heads that stop", stall_in_the_head, OTHERS_SERVED),
    Case("100 heads and bodies that never end", stall_everywhere, responds(408), within_s=45.0, is_long=True),
    Case(
        "a client that reads nothing",
        read_nothing,
        Reaction("others are served, it is cut off", _cut_off),
        flags=("--null_step_ms", "0"),
        within_s=90.0,
        is_long=True,
    ),
    Case("bodies that are no JSON object", send_bad_bodies, responds(400), within_s=60.0, is_long=True),
    Case("what is not proper HTTP", send_bad_http, OTHERS_SERVED, within_s=60.0, is_long=True),
    Case("a header of 100 MB", send_a_huge_header, responds(431)),
    Case("huge request ids", send_huge_request_ids, Reaction("cut to 128, or 431", OTHERS_SERVED.wait)),
    Case(
        "one request id for two", use_one_request_id_twice, Reaction("kept apart, aborted together", OTHERS_SERVED.wait)
    ),
    Case("2,000 connections that say nothing", storm, OTHERS_SERVED, within_s=30.0, is_long=True),
    Case("1,000 requests in one write", pipeline, OTHERS_SERVED, within_s=30.0),
    Case("10,000 idle connections", open_many, OTHERS_SERVED, within_s=60.0, is_long=True),
    Case("more connections than descriptors", run_out_of_descriptors, OTHERS_SERVED, is_long=True),
]
if sys.platform == "linux":
    CASES.append(
        Case(
            "clients vanish without a goodbye",
            lose_power,
            Reaction("aborted after a minute", ABORTED.wait),
            flags=("--null_step_ms", "20"),  # slow enough for a response of more than a minute
            within_s=90.0,
            is_long=True,
        )
    )
