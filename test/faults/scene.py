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
from test.faults.engine import Engine
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
TIMES_AS_LONG = (1, 2, 4, 8)  # answers, until a fault meets them
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
        stream = Stream(self.client, self.fitting({"prompt": [501, 502, 503], "temperature": 0, **body}))
        self.exits.callback(stream.close)
        return stream

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, self.deadline_s)

    def health(self) -> int:
        return self.client.send("GET", "/health")[0]

    def load(self) -> int:
        """Requests that are open."""
        return int(orjson.loads(self.client.send("GET", "/load")[1])["server_load"])

    def requests_in_router(self) -> float:
        metrics = self.server.metrics()
        return metrics["num_requests_running"] + metrics["num_requests_waiting"]

    def text_of(self, body: dict[str, Any]) -> str:
        """What the server says to it now, when nothing is wrong."""
        status, answer = self.complete(body)
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        return self.client.post(COMPLETE, self.fitting(body) | {"ignore_eos": True})

    def longest_answer(self, prompt_len: int = 3) -> int:
        """In tokens: one that is not over before a case is done with it."""
        return self.running.engine.context_len - prompt_len

    def fitting(self, body: dict[str, Any]) -> dict[str, Any]:
        """The same request in tokens that the model has."""
        return body | {"prompt": self.running.engine.ids(body["prompt"])}


@contextmanager
def scene_of(running: Running, situation: Situation, random: Random, deadline_s: float) -> Iterator[Scene]:
    scene = Scene(running, random, deadline_s)
    with scene.exits:
        for times in TIMES_AS_LONG if situation.streams else ():
            scene.streams = [scene.stream(**body) for body in _bodies(situation, running.engine, random, times)]
            if _goes_on(scene, situation):
                break
        else:
            assert not situation.streams, "answers were over before the fault: the model's context is too short"
        yield scene


def _goes_on(scene: Scene, situation: Situation) -> bool:
    """Whether the situation is there, and not over already, as when the model is faster than it was."""
    if not situation.has_begun:
        scene.wait_until(lambda: scene.load() == situation.streams)
        return True
    for stream in scene.streams:  # of long answers no more: a tiny model's tokens often have no text, and so no event
        stream.read_events(scene.random.randint(1, situation.tokens // 4))
    return scene.load() > 0


def _bodies(situation: Situation, engine: Engine, random: Random, times: int) -> Iterator[dict[str, Any]]:
    tokens, prompt_len = situation.tokens, situation.prompt_len
    if situation.has_begun:
        tokens = engine.tokens(tokens * times, prompt_len)
    prompt_len = engine.prompt_len(prompt_len, tokens)
    for index in range(situation.streams):
        prompt = [random.randrange(20_000)] + [1000 + 200 * index] * (prompt_len - 1)  # not cached
        yield {"prompt": prompt, "max_tokens": tokens}
