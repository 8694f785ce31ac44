"""What a fault finds when it comes: a server, what it is doing meanwhile, and means to ask it."""

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
from test.faults.stage import Running
from test.waiting import wait_until

DONE = b"data: [DONE]\n\n"
_EVENT = re.compile(rb"^data: (\{.*\})$", re.MULTILINE)


class Stream:
    """A streamed answer under way, on a connection of its own."""

    def __init__(self, client: Client, body: dict[str, Any]) -> None:
        self.body = body
        self.seen = b""
        self.sock = client.open()
        self.sock.sendall(generate(**body, stream=True))

    def read_events(self, count: int) -> None:
        while self.seen.count(b"data: ") < count and self._read():
            pass

    def rest(self) -> bytes:
        """All that came until the server ended the connection, however it did."""
        while self._read():
            pass
        return self.seen

    @property
    def text(self) -> str:
        events = [orjson.loads(event) for event in _EVENT.findall(self.seen)]
        return "".join(event["choices"][0]["text"] for event in events if "choices" in event)

    @property
    def is_whole(self) -> bool:
        return DONE in self.seen and b'"error"' not in self.seen

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
class Situation:
    """What goes on when the fault comes."""

    name: str
    streams: int = 0
    prompt_len: int = 3
    tokens: int = 100
    has_begun: bool = True  # the first tokens are there; else prompts are being computed


IDLE = Situation("idle")
STREAMING = Situation("streaming", streams=4)
PREFILL = Situation("prefill", streams=2, prompt_len=4000, tokens=4, has_begun=False)
LOAD = Situation("load", streams=64, tokens=30)
PREFILL_FLAGS = ("--null_step_ms", "50", "--batch_max_tokens", "64")  # 4,000 tokens take three seconds


@dataclass
class Scene:
    running: Running
    random: Random
    deadline_s: float
    streams: list[Stream] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)  # of the answers that the fault got, for the reaction
    exits: ExitStack = field(default_factory=ExitStack)

    @property
    def server(self) -> ServerProcess:
        return self.running.server

    @property
    def client(self) -> Client:
        return self.running.client

    def open(self) -> socket.socket:
        """A connection that is closed when the case is over, if not before."""
        return self.exits.enter_context(self.client.open())

    def stream(self, **body: Any) -> Stream:
        stream = Stream(self.client, {"prompt": [501, 502, 503], "temperature": 0, **body})
        self.exits.callback(stream.close)
        return stream

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, self.deadline_s)

    def health(self) -> int:
        return self.client.send("GET", "/health")[0]

    def text_of(self, body: dict[str, Any]) -> str:
        """What the server says to it now, when nothing is wrong."""
        status, answer = self.client.post(COMPLETE, body | {"ignore_eos": True})
        assert status == 200, answer
        return str(answer["choices"][0]["text"])


@contextmanager
def scene_of(running: Running, situation: Situation, random: Random, deadline_s: float) -> Iterator[Scene]:
    scene = Scene(running, random, deadline_s)
    with scene.exits:
        for index in range(situation.streams):
            prompt = [random.randrange(20_000)] + [1000 + 200 * index] * (situation.prompt_len - 1)  # not cached
            scene.streams.append(scene.stream(prompt=prompt, max_tokens=situation.tokens))
        for stream in scene.streams if situation.has_begun else ():
            stream.read_events(random.randint(1, situation.tokens // 4))
        if not situation.has_begun:
            wait_until(lambda: scene.server.metrics()["num_requests_running"] == situation.streams)
        yield scene
