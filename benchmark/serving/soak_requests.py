"""The kinds of requests of the soak, and how each must end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

Body = dict[str, Any] | bytes

CHAT, COMPLETE, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "drink",
    "tea",
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
BAD: list[tuple[str, Body]] = [
    (CHAT, b"{"),
    (COMPLETE, b'{"prompt": "\\ud83d"}'),
    (GENERATE, b"[" * 100_000),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 0}),
    (COMPLETE, {"prompt": "x", "max_tokens": 10**12}),
    (COMPLETE, {"prompt": "x", "temperature": -1}),
    (COMPLETE, {"prompt": [10**9]}),
    (COMPLETE, {"prompt": "x", "structured_outputs": {"regex": "(a"}}),
    (GENERATE, {"inputs": "", "parameters": {}}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/responses", {"input": 5}),
    ("/tokenize", {"prompt": 5}),
]
OVERLOADED = 429


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    make: Callable[[Random], tuple[str, Body]]  # path and body
    weight: int = 4
    statuses: tuple[int, ...] = (200,)
    end: bytes = b""  # that a response with status 200 must have near its end
    disconnects_after: int | None = None  # events: it disconnects then; None: it waits for the end
    is_aborted: bool = False  # by name, until it has ended

    def named(self, name: str) -> dict[str, Any]:
        return {"request_id": name} if self.is_aborted else {}

    def is_expected_end(self, status: int, end: bytes) -> bool:
        if self.disconnects_after is not None:
            return status in (0, 200, OVERLOADED)
        if status == OVERLOADED:
            return True
        return status in self.statuses and (status != 200 or self.end in end)


def text(rng: Random, most: int = 60) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def messages(rng: Random) -> dict[str, Any]:
    turns = [{"role": "user", "content": text(rng)}, {"role": "assistant", "content": text(rng)}]
    return {"messages": (turns * rng.randint(0, 2)) + turns[:1]}


def sampling(rng: Random, most: int) -> dict[str, Any]:
    found: dict[str, Any] = {"max_tokens": rng.randint(1, most), "temperature": rng.choice((0, 0.7, 1.0))}
    extra: tuple[dict[str, Any], ...] = (
        {},
        {"seed": 7},
        {"top_p": 0.9},
        {"stop": ["zz"]},
        {"presence_penalty": 1.0},
        {"ignore_eos": True},
    )
    return found | rng.choice(extra)


def short(rng: Random) -> tuple[str, Body]:
    return COMPLETE, {"prompt": text(rng), **sampling(rng, 16)}


def streamed(rng: Random) -> tuple[str, Body]:
    return CHAT, {**messages(rng), **sampling(rng, 64), "stream": True}


def long(rng: Random) -> tuple[str, Body]:
    return COMPLETE, {"prompt": text(rng, 800), **sampling(rng, 400), "stream": True}


def endless(rng: Random) -> tuple[str, Body]:
    body = {"prompt": text(rng), "max_tokens": 2000, "ignore_eos": True, "stream": True}
    return COMPLETE, body | {"n": rng.choice((1, 2))}


def several(rng: Random) -> tuple[str, Body]:
    return CHAT, {**messages(rng), **sampling(rng, 32), "n": rng.randint(2, 4), "logprobs": True}


def constrained(rng: Random) -> tuple[str, Body]:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    return CHAT, {**messages(rng), **sampling(rng, 48), "response_format": wanted}


def by_regex(rng: Random) -> tuple[str, Body]:
    return COMPLETE, {"prompt": text(rng), "max_tokens": 16, "structured_outputs": {"regex": "[ab]{5,9}"}}


def lightllm(rng: Random) -> tuple[str, Body]:
    parameters = {"max_new_tokens": rng.randint(1, 32), "do_sample": rng.random() < 0.5, "return_details": True}
    return GENERATE, {"inputs": text(rng), "parameters": parameters}


def tgi(rng: Random) -> tuple[str, Body]:
    parameters = {"max_new_tokens": rng.randint(1, 32), "details": True, "stop": ["zz"]}
    return "/generate_stream", {"inputs": text(rng), "parameters": parameters}


def responses(rng: Random) -> tuple[str, Body]:
    return "/v1/responses", {"input": text(rng), "max_output_tokens": rng.randint(1, 32), "stream": True}


def anthropic(rng: Random) -> tuple[str, Body]:
    return "/v1/messages", {**messages(rng), "max_tokens": rng.randint(1, 32), "stream": True}


def tokenized(rng: Random) -> tuple[str, Body]:
    return "/tokenize", {"prompt": text(rng, 500)}


def late(rng: Random) -> tuple[str, Body]:
    return COMPLETE, {"prompt": text(rng), "max_tokens": 2000, "ignore_eos": True, "timeout": 0.2}


def bad(rng: Random) -> tuple[str, Body]:
    return rng.choice(BAD)


DONE = b"data: [DONE]"
KINDS = [
    Kind("short", short, weight=12),
    Kind("streamed", streamed, weight=8, end=DONE),
    Kind("long", long, weight=2, end=DONE),
    Kind("several choices", several),
    Kind("by schema", constrained),
    Kind("by regex", by_regex),
    Kind("LightLLM's", lightllm),
    Kind("TGI's", tgi, end=b'"generated_tokens":'),
    Kind("responses", responses, end=b'"output_tokens":'),
    Kind("messages", anthropic, end=b"message_stop"),
    Kind("tokenized", tokenized, weight=2),
    Kind("past its deadline", late, weight=1, statuses=(200, 504)),
    Kind("bad", bad, weight=8, statuses=(400, 422)),
    Kind("disconnected at once", endless, disconnects_after=0),
    Kind("disconnected at the first event", endless, disconnects_after=1),
    Kind("disconnected in the middle", endless, disconnects_after=50),
    Kind("aborted", endless, statuses=(200, 499), end=DONE, is_aborted=True),
]
