"""A fake router and detokenizer: real channels, scripted outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from lightserve.config import HttpConfig
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import HttpServerManager
from lightserve.ipc.channel import Receiver, Sender
from lightserve.messages.control import EngineInfo
from lightserve.messages.metrics import Recorder
from lightserve.messages.output import (
    AdapterReply,
    Admission,
    BatchStrOut,
    EmbeddingOut,
    ProfileReply,
    RequestTimeline,
    RouterStats,
    StrOut,
    Timelines,
    ToHttpserver,
)
from lightserve.messages.params import FinishReason
from lightserve.messages.request import (
    AbortReq,
    AdapterQuery,
    ContinueReq,
    GenerateReq,
    GetTimelines,
    ReleaseParents,
    StartProfile,
    StopProfile,
    ToRouter,
)
from lightserve.messages.step import ReqFailed, Token
from lightserve.model_files.tokenizer.tokenizer import Tokenizer

LIMITS = EngineInfo(
    max_total_token_num=4096, max_req_total_len=1024, vocab_size=49152, pipeline_depth=1, step_timeout_s=240.0
)

Script = Callable[[GenerateReq], Sequence[StrOut | ReqFailed | EmbeddingOut]]


def spell(text: str, finish_reason: FinishReason = FinishReason.STOP) -> Script:
    """Gives every request the output ``text``, one character a token, with the character's code as its id."""

    def script(req: GenerateReq) -> list[StrOut | ReqFailed]:
        outs: list[StrOut | ReqFailed] = []
        for i, char in enumerate(text):
            is_last = i == len(text) - 1
            wants = req.params.sampling.logprobs
            outs.append(
                StrOut(
                    req.req_id,
                    char,
                    Token(
                        ord(char) % LIMITS.vocab_size,
                        logprob=None if wants is None else -0.5,
                        top_logprobs=None if wants is None else [(k, -1.0 - k) for k in range(int(wants))],
                    ),
                    finish_reason=finish_reason if is_last else None,
                    admission=Admission(0.001, 2) if i == 0 else None,
                )
            )
        return outs

    return script


class FakeEngine:
    """Sends the outputs of its script, one token per message; ``received`` and ``aborted`` record the requests."""

    def __init__(self, script: Script, run_dir: Path) -> None:
        self.script = script
        self.received: list[GenerateReq] = []
        self.begun_at: list[int] = []  # of each: how many tokens it had already
        self.aborted: list[int] = []
        self.parents: dict[int, list[int]] = {}  # prompts of open groups by request, until they are released
        self.most_parents = 0  # at once
        self.num_sent_ids = 0  # of prompts
        self.profile_messages: list[StartProfile | StopProfile] = []
        self.profile_reply = ProfileReply(0)  # to every one of them
        self.adapter_queries: list[AdapterQuery] = []
        self.adapter_reply = AdapterReply(0)  # to every one of them
        self.queries: list[GetTimelines] = []
        self.timelines: list[RequestTimeline] = []  # the reply to every query
        self.hold = asyncio.Event()  # cleared: tokens after the first of a request wait
        self.hold.set()
        self._inbox: Receiver[ToRouter] = Receiver(f"ipc://{run_dir}/router", ToRouter)
        self._outbox: Sender[ToHttpserver] | None = None
        self._run_dir = run_dir
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, message: ToHttpserver) -> None:
        assert self._outbox is not None
        self._outbox.send(message)

    async def run(self) -> None:
        self._outbox = Sender(f"ipc://{self._run_dir}/http")
        while True:
            message = await self._inbox.recv()
            if isinstance(message, AbortReq):
                self.aborted.append(message.req_id)
            elif isinstance(message, ReleaseParents):
                for req_id in message.req_ids:
                    del self.parents[req_id]
            elif isinstance(message, GetTimelines):
                self.queries.append(message)
                self._outbox.send(Timelines(message.query_id, self.timelines))
            elif isinstance(message, StartProfile | StopProfile):
                self.profile_messages.append(message)
                self._outbox.send(msgspec.structs.replace(self.profile_reply, query_id=message.query_id))
            elif isinstance(message, AdapterQuery):
                self.adapter_queries.append(message)
                self._outbox.send(msgspec.structs.replace(self.adapter_reply, query_id=message.query_id))
            elif isinstance(message, GenerateReq):
                self._start(message)
            elif isinstance(message, ContinueReq):
                self._start(message.request, len(message.output_ids))

    def _start(self, message: GenerateReq, num_tokens: int = 0) -> None:
        """Begin after so many tokens of the script."""
        self.received.append(self._with_whole_prompt(message))
        self.begun_at.append(num_tokens)
        task = asyncio.create_task(self._respond(self.received[-1], num_tokens))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _with_whole_prompt(self, req: GenerateReq) -> GenerateReq:
        self.num_sent_ids += len(req.prompt_ids)
        prompt_ids = [*([] if req.parent is None else self.parents[req.parent]), *req.prompt_ids.tolist()]
        if req.is_group_open:
            self.parents[req.req_id] = prompt_ids
            self.most_parents = max(self.most_parents, len(self.parents))
        return msgspec.structs.replace(req, prompt_ids=prompt_ids)

    async def _respond(self, req: GenerateReq, num_tokens: int) -> None:
        assert self._outbox is not None
        for i, out in enumerate(self.script(req)[num_tokens:]):
            if i:
                await self.hold.wait()
            failed = [out] if isinstance(out, ReqFailed) else []
            outs = [out] if isinstance(out, StrOut) else []
            embeddings = [out] if isinstance(out, EmbeddingOut) else []
            self._outbox.send(BatchStrOut(outs, failed, embeddings))
            await asyncio.sleep(0)


@asynccontextmanager
async def engine(
    run_dir: Path, script: Script, tokenizer: Tokenizer | None, config: HttpConfig | None = None
) -> AsyncIterator[tuple[ServerContext, FakeEngine]]:
    """A context whose manager talks to a fake engine."""
    fake = FakeEngine(script, run_dir)
    from_detokenization: Receiver[ToHttpserver] = Receiver(f"ipc://{run_dir}/http", ToHttpserver)
    to_router: Sender[ToRouter] = Sender(f"ipc://{run_dir}/router")
    manager = HttpServerManager(0, to_router, from_detokenization)
    manager.engine_info(LIMITS)
    manager.stats = RouterStats(0.0, Recorder().snapshot())  # an idle router sends them at once
    tasks = [asyncio.create_task(fake.run()), asyncio.create_task(manager.run())]
    try:
        created = int(time.time())
        context = ServerContext(
            config or HttpConfig(), "tiny", manager, tokenizer, created=created, run_dir=str(run_dir)
        )
        yield context, fake
        context.grammars.close()
    finally:
        for task in tasks:
            task.cancel()
        from_detokenization.close()
        to_router.close()
