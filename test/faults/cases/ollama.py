"""Processes that die during the streams of Ollama's API: lines of JSON, without events and without [DONE]."""

from __future__ import annotations

import re
import signal
from typing import Any

import orjson

from test.api.test_faults import Client, http_request
from test.faults.case import Case
from test.faults.cases.processes import STEP, Fault, send_signal
from test.faults.harness import FaultContext, Stream
from test.faults.reactions import Reaction, ends, streams_continue

HEAD = b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
STREAMS = 4
TOKENS = 100
_LINE = re.compile(rb"^(\{.*\})\r?$", re.MULTILINE)


class OllamaStream(Stream):
    def __init__(self, client: Client, body: dict[str, Any]) -> None:
        self.body = body
        self.seen = b""
        self.sock = client.open()
        encoded = orjson.dumps(body)
        self.sock.sendall(http_request(HEAD, b"Content-Length: %d" % len(encoded), body=encoded))

    @property
    def lines(self) -> list[Any]:
        return [orjson.loads(line) for line in _LINE.findall(self.seen)]

    def read_events(self, count: int) -> None:
        while len(self.lines) < count and self._read():
            pass

    @property
    def text(self) -> str:
        return "".join(line.get("response", "") for line in self.lines)

    @property
    def is_complete(self) -> bool:
        return bool(self.lines) and self.lines[-1].get("done") is True


def open_stream(context: FaultContext, body: dict[str, Any]) -> OllamaStream:
    stream = OllamaStream(context.client, body)
    context.exits.callback(stream.close)
    return stream


def model_name(context: FaultContext) -> str:
    _, response = context.client.send("GET", "/v1/models")
    return str(orjson.loads(response)["data"][0]["id"])


def in_streams(fault: Fault) -> Fault:
    """The fault, while streams of Ollama's API run."""

    def fault_in_streams(context: FaultContext) -> None:
        tokens = context.running.engine.tokens(TOKENS, prompt_len=16)
        options = {"num_predict": tokens, "temperature": 0}
        body = {"model": model_name(context), "raw": True, "options": options}
        prompts = [f"{context.random.random()} {index}" for index in range(STREAMS)]  # not in the prefix cache
        context.streams += [open_stream(context, body | {"prompt": prompt}) for prompt in prompts]
        for stream in context.streams:
            stream.read_events(context.random.randint(1, TOKENS // 4))
            assert b'"response"' in stream.seen, stream.seen
        fault(context)

    return fault_in_streams


def same_text(context: FaultContext) -> None:
    for stream in context.streams:
        again = open_stream(context, stream.body)
        again.read_all()
        assert again.is_complete, again.seen[-500:]
        assert stream.text == again.text, f"then {stream.text!r}\nnow  {again.text!r}"


def _end_with_an_error(context: FaultContext) -> None:
    for stream in context.streams:
        assert isinstance(stream, OllamaStream)
        assert list(stream.lines[-1]) == ["error"], stream.seen[-500:]


CASES = [
    Case(
        "kill -9 ls-worker, streams of Ollama's API",
        in_streams(send_signal("ls-worker", signal.SIGKILL)),
        Reaction("streams go on, same text", streams_continue, same_text),
        flags=STEP,
        within_s=20.0,
        is_long=True,
        restarts=1,
    ),
    Case(
        "kill -9 ls-router, streams of Ollama's API",
        in_streams(send_signal("ls-router", signal.SIGKILL)),
        Reaction(
            "clients get a line with the error, exit code 1",
            ends(1, "router died (signal 9)").wait,
            _end_with_an_error,
            ends_server=True,
        ),
        flags=STEP,
        is_long=True,
    ),
]
