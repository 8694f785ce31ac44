"""The context of a fault: a server, its workload, and helpers to send requests."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import orjson

from test.api.server import ServerProcess
from test.api.test_faults import COMPLETE, Client, generate
from test.faults.model_limits import ModelLimits
from test.faults.server_pool import ServerUnderTest
from test.waiting import wait_until

DONE = b"data: [DONE]\n\n"
_EVENT = re.compile(rb"^data: (\{.*\})$", re.MULTILINE)


class Stream:
    """A streamed response in flight, on its own connection."""

    def __init__(self, client: Client, body: dict[str, Any]) -> None:
        self.body = body
        self.seen = b""
        self.sock = client.open()
        self.sock.sendall(generate(**body, stream=True))

    def read_events(self, count: int) -> None:
        while self.seen.count(b"data: ") < count and self._read():
            pass

    def read_all(self) -> bytes:
        """All bytes until the server ends the connection, in any way."""
        while self._read():
            pass
        return self.seen

    @property
    def text(self) -> str:
        events = [orjson.loads(event) for event in _EVENT.findall(self.seen)]
        return "".join(event["choices"][0]["text"] for event in events if "choices" in event)

    @property
    def is_complete(self) -> bool:
        return DONE in self.seen and b'"error":' not in self.seen

    def close(self) -> None:
        self.sock.close()

    def _read(self) -> bool:
        try:
            piece = self.sock.recv(65536)
        except ConnectionResetError:
            return False
        self.seen += piece
        return bool(piece)


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests that run when the fault occurs."""

    name: str
    streams: int = 0
    prompt_len: int = 3
    tokens: int = 100
    is_decoding: bool = True  # the fault occurs after the first tokens; otherwise during prefill


IDLE = Workload("idle")
STREAMING = Workload("streaming", streams=4)
PREFILL = Workload("prefill", streams=2, prompt_len=4000, tokens=4, is_decoding=False)
LOAD = Workload("load", streams=64, tokens=30)
LENGTH_FACTORS = (1, 2, 4, 8)  # of responses, tried until they still run when the fault occurs
PREFILL_FLAGS = ("--null_step_ms", "50", "--batch_max_tokens", "64")  # 4,000 tokens take three seconds


@dataclass
class FaultContext:
    running: ServerUnderTest
    random: Random
    deadline_s: float
    streams: list[Stream] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)  # of the fault's own requests, for the reaction
    exits: ExitStack = field(default_factory=ExitStack)

    @property
    def server(self) -> ServerProcess:
        return self.running.server

    @property
    def client(self) -> Client:
        return self.running.client

    def open(self) -> socket.socket:
        """A connection that is closed at the end of the case at the latest."""
        return self.exits.enter_context(self.client.open())

    def stream(self, **body: Any) -> Stream:
        stream = Stream(self.client, self.fit_to_model({"prompt": [501, 502, 503], "temperature": 0, **body}))
        self.exits.callback(stream.close)
        return stream

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, self.deadline_s)

    def health(self) -> int:
        return self.client.send("GET", "/health")[0]

    def load(self) -> int:
        """The number of open requests."""
        return int(orjson.loads(self.client.send("GET", "/load")[1])["server_load"])

    def requests_in_router(self) -> float:
        metrics = self.server.metrics()
        return metrics["num_requests_running"] + metrics["num_requests_waiting"]

    def complete_text(self, body: dict[str, Any]) -> str:
        """The text of a completion, which must succeed."""
        status, response = self.complete(body)
        assert status == 200, response
        return str(response["choices"][0]["text"])

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        return self.client.post(COMPLETE, self.fit_to_model(body) | {"ignore_eos": True})

    def longest_response(self, prompt_len: int = 3) -> int:
        """Tokens of a response that does not end before the case does."""
        return self.running.engine.context_len - prompt_len

    def fit_to_model(self, body: dict[str, Any]) -> dict[str, Any]:
        """The same request with token ids that the model has."""
        return body | {"prompt": self.running.engine.ids(body["prompt"])}


@contextmanager
def fault_context(
    running: ServerUnderTest, workload: Workload, random: Random, deadline_s: float
) -> Iterator[FaultContext]:
    context = FaultContext(running, random, deadline_s)
    with context.exits:
        for times in LENGTH_FACTORS if workload.streams else ():
            bodies = _bodies(workload, running.engine, random, times)
            context.streams = [context.stream(**body) for body in bodies]
            if _is_in_progress(context, workload):
                break
        else:
            assert not workload.streams, "responses ended before the fault: the model's context is too short"
        yield context


def _is_in_progress(context: FaultContext, workload: Workload) -> bool:
    """Whether the workload still runs. It may have ended if the model is faster than measured."""
    if not workload.is_decoding:
        context.wait_until(lambda: context.load() == workload.streams)
        return True
    for stream in context.streams:  # few: tokens of a tiny model often have no text
        stream.read_events(context.random.randint(1, workload.tokens // 4))
    return context.load() > 0


def _bodies(workload: Workload, engine: ModelLimits, random: Random, times: int) -> Iterator[dict[str, Any]]:
    tokens, prompt_len = workload.tokens, workload.prompt_len
    if workload.is_decoding:
        tokens = engine.tokens(tokens * times, prompt_len)
    prompt_len = engine.prompt_len(prompt_len, tokens)
    for index in range(workload.streams):
        prompt = [random.randrange(20_000)] + [1000 + 200 * index] * (prompt_len - 1)  # not in the prefix cache
        yield {"prompt": prompt, "max_tokens": tokens}
