"""Clients that leave, stall, lie or come in crowds."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import select
import socket
import struct
import sys
from typing import Any

import psutil

from test.api.test_faults import BODIES, EVERY_BODY, GET, POST, RAW, generate, http_request, leave, read_until
from test.faults.case import Case
from test.faults.reactions import ABORTED, SERVED_ON, STREAMS_GO_ON, Reaction, answers
from test.faults.scene import STREAMING, Scene
from test.waiting import wait_until

SPARE_DESCRIPTORS = 30
SO_ATTACH_FILTER, BPF_RETURN = 26, 0x06  # of Linux: a program that looks at every packet for a socket


def status_of(sock: socket.socket) -> int:
    """Of the answer that comes next; 0 if the server hung up instead."""
    with contextlib.suppress(ConnectionResetError):
        head = sock.recv(65536)
        return int(head.split()[1]) if head else 0
    return 0


# leaving


def two_long_answers(scene: Scene) -> dict[str, Any]:
    prompt = scene.running.engine.ids([501] * 20)
    return {"prompt": prompt, "n": 2, "max_tokens": scene.longest_answer(len(prompt))}


def leave_before_the_first_token(scene: Scene) -> None:
    for abruptly in (False, True):
        for is_streamed in (False, True):
            sock = scene.open()
            sock.sendall(generate(stream=is_streamed, **two_long_answers(scene)))
            leave(sock, abruptly)


def leave_in_the_middle(scene: Scene) -> None:
    for abruptly in (False, True):
        sock = scene.open()
        sock.sendall(generate(stream=True, **two_long_answers(scene)))
        read_until(sock, b"data: ")
        leave(sock, abruptly)


def leave_after_the_last_token(scene: Scene) -> None:
    for abruptly in (False, True):
        sock = scene.open()
        sock.sendall(generate(stream=True, max_tokens=2))
        read_until(sock, b'"finish_reason":"length"')
        leave(sock, abruptly)


def leave_while_others_stream(scene: Scene) -> None:
    for _ in range(20):
        leave_in_the_middle(scene)


def fall_silent(scene: Scene) -> None:
    """Half-open connections: the clients' machines are gone, without a goodbye. One waits, one has a stream."""
    for is_streamed in (False, True):
        sock = scene.open()
        sock.sendall(generate(stream=is_streamed, **two_long_answers(scene)))
        if is_streamed:
            read_until(sock, b"data: ")
        silence(sock)


def silence(sock: socket.socket) -> None:
    """Its kernel drops all that comes for it from now on, and so acknowledges nothing."""
    drop = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(drop)))


# stalling


def read_nothing(scene: Scene) -> None:
    """As slow as a reader can be: its buffer is small, and it leaves what is in it."""
    sock = scene.exits.enter_context(socket.socket())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((scene.client.place.hostname, scene.client.place.port))
    sock.sendall(generate(stream=True, n=64, max_tokens=8000))


def _cut_off(scene: Scene) -> None:
    """Memory stays bounded, others are served, and in the end the engine is free again."""
    http = scene.server.processes()["ls-httpserver"][0]
    before = http.memory_info().rss
    others = [scene.text_of({"prompt": [501, 502, 503], "max_tokens": 4}) for _ in range(20)]
    ABORTED.wait(scene)
    assert len(set(others)) == 1
    assert http.memory_info().rss - before < 64 * 2**20


def stall_in_the_head(scene: Scene) -> None:
    for index in range(200):
        scene.open().sendall(GET[: 1 + index % len(GET)])


def stall_everywhere(scene: Scene) -> None:
    """In heads, in bodies that are shorter than they claim, in chunks without an end."""
    starts = [GET, b"GET /health HTTP/1.1\r\nX: ", POST + b"\r\nContent-Length: 100\r\n\r\n{"]
    starts += [POST + b'\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"pro\r\n']
    socks = []
    for start in starts * 25:
        socks.append(scene.open())
        socks[-1].sendall(start)
    assert scene.health() == 200
    scene.statuses += [status_of(sock) for sock in socks]


# lying


def send_bad_bodies(scene: Scene) -> None:
    scene.statuses += [scene.client.post(path, body)[0] for path in EVERY_BODY for body in BODIES]


def send_bad_http(scene: Scene) -> None:
    wrong = [
        (status, data[:80], answer[:80])
        for status, data in RAW
        if not (answer := scene.client.raw(data)).startswith(b"HTTP/1.1 %d " % status)
    ]
    assert not wrong, wrong


def send_a_huge_header(scene: Scene) -> None:
    """100 MB; whoever is refused on the way need not send the rest."""
    sock = scene.open()
    sock.sendall(GET + b"\r\nX: ")
    for _ in range(100):
        if select.select([sock], [], [], 0)[0]:
            break
        sock.sendall(b"x" * 2**20)
    scene.statuses.append(status_of(sock))


def send_huge_request_ids(scene: Scene) -> None:
    for length, status in ((129, 200), (10_000, 200), (10**6, 431)):
        answer = scene.client.raw(http_request(GET, b"X-Request-Id: " + b"x" * length))
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:100]
        assert b"x" * 129 not in answer


def use_one_request_id_twice(scene: Scene) -> None:
    """The answers keep apart, and one word ends both."""
    named = [scene.stream(prompt=[100 * i], max_tokens=20, request_id="twin") for i in (1, 2)]
    for stream in named:
        stream.rest()
        assert stream.is_whole
        assert stream.text == scene.text_of({**stream.body, "request_id": "other"})
    longer = [scene.stream(max_tokens=scene.longest_answer(), request_id="twin") for _ in range(2)]
    for stream in longer:
        stream.read_events(1)
    scene.client.post("/abort_request", {"request_id": "twin"})
    assert all(b"request_aborted" in stream.rest() for stream in longer)


# crowds


def storm(scene: Scene) -> None:
    """Connections that come and go without a word, and some with half a one."""
    for index in range(2000):
        with scene.client.open() as sock:
            if index % 10 == 0:
                sock.sendall(scene.random.randbytes(20))


def pipeline(scene: Scene) -> None:
    count = 1000
    once = GET + b"\r\nHost: x\r\n\r\n"
    answer = scene.client.raw(once * (count - 1) + http_request(GET, b"Host: x"))
    assert answer.count(b"HTTP/1.1 200 ") == count


def open_many(scene: Scene) -> None:
    """Ten thousand, or as many as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    scene.exits.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    for _ in range(min(10_000, hard - 1000)):
        scene.open()


def run_out_of_descriptors(scene: Scene) -> None:
    """The HTTP process may open thirty more; a hundred come."""
    http = scene.server.processes()["ls-httpserver"][0]
    limits = http.rlimit(psutil.RLIMIT_NOFILE)
    http.rlimit(psutil.RLIMIT_NOFILE, (http.num_fds() + SPARE_DESCRIPTORS, limits[1]))
    socks = [scene.open() for _ in range(100)]
    wait_until(lambda: http.num_fds() >= http.rlimit(psutil.RLIMIT_NOFILE)[0] - 1)
    for sock in socks:
        sock.close()
    http.rlimit(psutil.RLIMIT_NOFILE, limits)


CASES = [
    Case("clients leave before the first token", leave_before_the_first_token, ABORTED),
    Case("clients leave in the middle", leave_in_the_middle, ABORTED),
    Case("clients leave before [DONE]", leave_after_the_last_token, ABORTED),
    Case("clients leave while others stream", leave_while_others_stream, STREAMS_GO_ON, during=STREAMING, is_long=True),
    Case("200 heads that stop", stall_in_the_head, SERVED_ON),
    Case("100 heads and bodies that never end", stall_everywhere, answers(408), within_s=45.0, is_long=True),
    Case(
        "a client that reads nothing",
        read_nothing,
        Reaction("others are served, it is cut off", _cut_off),
        flags=("--null_step_ms", "0"),
        within_s=90.0,
        is_long=True,
    ),
    Case("bodies that are no JSON object", send_bad_bodies, answers(400), within_s=60.0, is_long=True),
    Case("what is not proper HTTP", send_bad_http, SERVED_ON, within_s=60.0, is_long=True),
    Case("a header of 100 MB", send_a_huge_header, answers(431)),
    Case("huge request ids", send_huge_request_ids, Reaction("cut to 128, or 431", SERVED_ON.wait)),
    Case("one request id for two", use_one_request_id_twice, Reaction("kept apart, aborted together", SERVED_ON.wait)),
    Case("2,000 connections that say nothing", storm, SERVED_ON, within_s=30.0, is_long=True),
    Case("1,000 requests in one write", pipeline, SERVED_ON, within_s=30.0),
    Case("10,000 idle connections", open_many, SERVED_ON, within_s=60.0, is_long=True),
    Case("more connections than descriptors", run_out_of_descriptors, SERVED_ON, is_long=True),
]
if sys.platform == "linux":
    CASES.append(
        Case(
            "clients vanish without a goodbye",
            fall_silent,
            Reaction("aborted after a minute", ABORTED.wait),
            flags=("--null_step_ms", "20"),  # slow enough to have something to say for longer
            within_s=90.0,
            is_long=True,
        )
    )
