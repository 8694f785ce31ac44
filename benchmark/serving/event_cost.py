"""CPU time that an HTTP process spends on each token of a stream, from the detokenizer's message to the bytes it sends.

    python -m benchmark.serving.event_cost

The application runs in this process, without a socket and without an engine: many tokens come in one message, so the
time is that of the parser and the event writer. serving_path measures the whole server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fastapi import FastAPI

from benchmark.serving.serving_path import APIS
from lightserve.config import HttpConfig
from lightserve.httpserver.app import build_app
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import HttpServerManager
from lightserve.ipc.channel import Receiver, Sender
from lightserve.messages.control import EngineInfo
from lightserve.messages.output import Admission, BatchStrOut, StrOut, ToHttpserver
from lightserve.messages.params import FinishReason
from lightserve.messages.request import GenerateReq, ToRouter
from lightserve.messages.step import Token
from lightserve.model_files.source import resolve
from lightserve.model_files.tokenizer.tokenizer import Tokenizer, load_tokenizer

PER_MESSAGE = 64  # tokens that come at once
CONTEXT_LEN = 1 << 22
WORDS = (" the", " quick", " brown", " fox", " <", " jumps", ".\n", " over", " a", " lazy", " dog", ",")
CALL = ('<tool_call>\n{"name": "weather", "arguments": {"city": "', '"}}\n</tool_call>')


PLAIN = HttpConfig(disable_log_requests=True)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    api: str
    config: HttpConfig = PLAIN
    has_tools: bool = False
    around: tuple[str, str] = ("", "")  # the texts before and after the words


TOOLS = HttpConfig(tool_call_parser="hermes", disable_log_requests=True)
REASONING = HttpConfig(reasoning_parser="deepseek_r1", disable_log_requests=True)
CASES = (
    Case("completions", "completions"),
    Case("chat", "chat"),
    Case("chat, in reasoning", "chat", REASONING, around=("<think>", "")),
    Case("chat, after reasoning", "chat", REASONING, around=("<think>\n</think>", "")),
    Case("chat, beside tools", "chat", TOOLS, has_tools=True),
    Case("chat, in a call", "chat", TOOLS, has_tools=True, around=CALL),
    Case("messages", "messages"),
    Case("messages, beside tools", "messages", TOOLS, has_tools=True),
    Case("messages, in a call", "messages", TOOLS, has_tools=True, around=CALL),
    Case("responses", "responses"),
    Case("responses, beside tools", "responses", TOOLS, has_tools=True),
    Case("responses, in a call", "responses", TOOLS, has_tools=True, around=CALL),
    Case("ollama", "ollama"),
    Case("ollama, in reasoning", "ollama", REASONING, around=("<think>", "")),
    Case("ollama, beside tools", "ollama", TOOLS, has_tools=True),
    Case("ollama, in a call", "ollama", TOOLS, has_tools=True, around=CALL),
)


class _Engine:
    """The manager's channels: messages for the router are collected, and messages of the detokenizer are handed out."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[ToRouter] = asyncio.Queue()
        self.messages: asyncio.Queue[ToHttpserver] = asyncio.Queue()

    def send(self, message: ToRouter) -> None:
        self.received.put_nowait(message)

    async def recv(self) -> ToHttpserver:
        return await self.messages.get()


def output_of(req_id: int, texts: Sequence[str]) -> Iterator[BatchStrOut]:
    admission = Admission(0.0, 0)
    last = len(texts) - 1
    outs = (
        StrOut(
            req_id,
            text,
            Token(1000),
            finish_reason=FinishReason.STOP if index == last else None,
            admission=admission if index == 0 else None,
        )
        for index, text in enumerate(texts)
    )
    while batch := list(itertools.islice(outs, PER_MESSAGE)):
        yield BatchStrOut(batch, [])


async def cost_us(case: Case, tokenizer: Tokenizer, tokens: int) -> float:
    """Microseconds of CPU time per token."""
    engine = _Engine()
    manager = HttpServerManager(0, cast(Sender[ToRouter], engine), cast(Receiver[ToHttpserver], engine))
    manager.engine_info(EngineInfo(CONTEXT_LEN, CONTEXT_LEN, tokenizer.num_ids, pipeline_depth=1))
    app = build_app(ServerContext(case.config, "model", manager, tokenizer))
    words = [*case.around[:1], *itertools.islice(itertools.cycle(WORDS), tokens), *case.around[1:]]
    running = asyncio.create_task(manager.run())
    sent: list[bytes] = []
    response = asyncio.create_task(_post(app, case, tokens, sent))
    try:
        seconds = await _seconds(engine, words, response)
    finally:
        running.cancel()
    if APIS[case.api].end not in sent[-1]:
        raise RuntimeError(f"{case.name}: the stream ended with {sent[-1][-200:]!r}")
    return seconds / tokens * 1e6


async def _seconds(engine: _Engine, words: Sequence[str], response: asyncio.Task[None]) -> float:
    """CPU seconds from the first token until the response has ended."""
    req = await engine.received.get()
    if not isinstance(req, GenerateReq):
        raise TypeError(f"the first message is {req}")
    batches = list(output_of(req.req_id, words))
    begin = time.process_time()
    for batch in batches:
        engine.messages.put_nowait(batch)
        await asyncio.sleep(0)
    await response
    return time.process_time() - begin


async def _post(app: FastAPI, case: Case, tokens: int, sent: list[bytes]) -> None:
    api = APIS[case.api]
    body = api.body(tokens + 2) | {"stream": True} | ({"tools": [api.tool]} if case.has_tools else {})
    messages: Iterator[dict[str, Any]] = iter([{"type": "http.request", "body": json.dumps(body).encode()}])
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": api.path, "headers": headers, "query_string": b""}

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        return message if message is not None else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        if message.get("body"):
            sent[:] = [*sent[-1:], message["body"]]

    await app(scope | {"scheme": "http", "server": ("localhost", 80)}, receive, send)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir", help="a model whose tokenizer and chat template are used")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--runs", type=int, default=5, help="of each case; the fastest counts")
    parser.add_argument("--case", default="", help="only cases whose name has this text")
    args = parser.parse_args()
    tokenizer = load_tokenizer(resolve(args.model_dir, needs_weights=False))
    for case in CASES:
        if args.case in case.name:
            best = min(asyncio.run(cost_us(case, tokenizer, args.tokens)) for _ in range(args.runs))
            print(f"{case.name}: {best:.2f} us per token", flush=True)


if __name__ == "__main__":
    main()
