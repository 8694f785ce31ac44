"""The detokenizer's loop over real channels, with a real model's vocabulary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from lightserve.detokenization.manager import DetokenizationManager
from lightserve.ipc.channel import Receiver, Sender
from lightserve.messages.int_arrays import int32s, int64s
from lightserve.messages.output import (
    Admission,
    BatchStrOut,
    BatchTokenIdOut,
    EmbeddingOut,
    MetricsSnapshot,
    RequestDrafts,
    RouterStats,
    StrOut,
    TextReq,
    Timelines,
    ToDetokenization,
    ToHttpserver,
    TokenIdOut,
)
from lightserve.messages.params import FinishReason, TextParams
from lightserve.messages.request import REQ_ID_BITS, AbortReq, ToRouter
from lightserve.messages.step import DraftColumns, ReqFailed, Token, TokenColumns
from test.real_model import smollm2_tokenizer
from test.waiting import until

M = TypeVar("M")

SECOND = 1 << REQ_ID_BITS  # the first id of the second HTTP process


class Detokenizer:
    """A running detokenizer with two HTTP processes."""

    def __init__(self, manager: DetokenizationManager, run_dir: Path) -> None:
        self.manager = manager
        self.tokenizer = smollm2_tokenizer()
        self.received: list[list[ToHttpserver]] = [[], []]
        self.aborts: list[ToRouter] = []
        self.inbox: Sender[ToDetokenization] = Sender(f"ipc://{run_dir}/detok")

    def send(self, *outs: TokenIdOut, **rest: list[TextReq] | list[ReqFailed] | list[int]) -> None:
        self.inbox.send(BatchTokenIdOut(list(outs), **rest))  # type: ignore[arg-type]

    def outs(self, http: int = 0) -> list[StrOut]:
        return [out for batch in self.received[http] if isinstance(batch, BatchStrOut) for out in batch.outs]

    def text(self, http: int = 0) -> str:
        return "".join(out.text for out in self.outs(http))

    @classmethod
    @asynccontextmanager
    async def running(cls, run_dir: Path) -> AsyncIterator[Detokenizer]:
        inbox: Receiver[ToDetokenization] = Receiver(f"ipc://{run_dir}/detok", ToDetokenization)
        router: Receiver[ToRouter] = Receiver(f"ipc://{run_dir}/router", ToRouter)
        https: list[Receiver[ToHttpserver]] = [Receiver(f"ipc://{run_dir}/http-{i}", ToHttpserver) for i in range(2)]
        senders: list[Sender[ToHttpserver]] = [Sender(f"ipc://{run_dir}/http-{i}") for i in range(2)]
        to_router: Sender[ToRouter] = Sender(f"ipc://{run_dir}/router")
        manager = DetokenizationManager(smollm2_tokenizer().decoder, inbox, to_router, senders)
        detokenizer = cls(manager, run_dir)
        tasks = [
            asyncio.create_task(manager.run()),
            asyncio.create_task(_collect(router, detokenizer.aborts)),
            *(
                asyncio.create_task(_collect(http, received))
                for http, received in zip(https, detokenizer.received, strict=True)
            ),
        ]
        try:
            yield detokenizer
        finally:
            for task in tasks:
                task.cancel()
            channels: list[Any] = [inbox, router, *https, *senders, to_router, detokenizer.inbox]
            for channel in channels:
                channel.close()


async def _collect(
    receiver: Receiver[ToHttpserver] | Receiver[ToRouter], into: list[ToHttpserver] | list[ToRouter]
) -> None:
    while True:
        into.append(await receiver.recv())  # type: ignore[arg-type]


def check(scenario: Callable[[Detokenizer], Awaitable[None]], run_dir: Path) -> None:
    async def run() -> None:
        async with Detokenizer.running(run_dir) as detokenizer:
            await scenario(detokenizer)

    asyncio.run(run())


def text_req(req_id: int, stop: tuple[str, ...] = (), include_stop: bool = False) -> TextReq:
    return TextReq(req_id, TextParams(stop=stop, include_stop=include_stop))


def test_streamed_text_equals_the_text_decoded_at_once(tmp_path: Path) -> None:
    wanted = "Grüße 🦙🦙 und 漢字!"

    async def scenario(detokenizer: Detokenizer) -> None:
        ids = detokenizer.tokenizer.encode(wanted, add_special_tokens=False)
        detokenizer.send(new=[text_req(1)])
        for i, token_id in enumerate(ids):
            is_last = i == len(ids) - 1
            admission = Admission(0.5, 3) if i == 0 else None
            reason = FinishReason.LENGTH if is_last else None
            detokenizer.send(
                TokenIdOut(
                    1,
                    Token(token_id, logprob=-1.0, top_logprobs=[(5, -2.0)]),
                    finish_reason=reason,
                    admission=admission,
                )
            )

        await until(lambda: len(detokenizer.outs()) == len(ids))

        assert detokenizer.text() == wanted
        assert [out.token.id for out in detokenizer.outs()] == ids
        assert detokenizer.outs()[0].admission == Admission(0.5, 3)
        assert detokenizer.outs()[0].token.top_logprobs == [(5, -2.0)]
        assert detokenizer.outs()[-1].finish_reason is FinishReason.LENGTH
        assert detokenizer.manager.num_open == 0

    check(scenario, tmp_path)


def test_the_result_of_a_pooling_request_ends_it(tmp_path: Path) -> None:
    """A dispatcher announces it as one that gets text."""

    async def scenario(detokenizer: Detokenizer) -> None:
        result = EmbeddingOut(SECOND, b"1234", Admission(0.5, 3))
        detokenizer.send(new=[text_req(SECOND)])
        detokenizer.inbox.send(BatchTokenIdOut(embeddings=[result]))

        await until(lambda: bool(detokenizer.received[1]))

        assert detokenizer.received == [[], [BatchStrOut(embeddings=[result])]]
        assert detokenizer.manager.num_open == 0

    check(scenario, tmp_path)


@pytest.mark.parametrize("said", [1, 5, 9])
def test_the_text_of_a_continued_request_goes_on_where_it_was(tmp_path: Path, said: int) -> None:
    wanted = "Grüße 🦙🦙 und 漢字!"

    async def scenario(detokenizer: Detokenizer) -> None:
        ids = detokenizer.tokenizer.encode(wanted, add_special_tokens=False)
        detokenizer.send(new=[text_req(1), TextReq(2, TextParams(), ids[:said])])
        for i, token_id in enumerate(ids):
            reason = FinishReason.LENGTH if i == len(ids) - 1 else None
            req_ids = (1,) if i < said else (1, 2)
            detokenizer.send(*(TokenIdOut(req_id, Token(token_id), finish_reason=reason) for req_id in req_ids))

        await until(lambda: len(detokenizer.outs()) == 2 * len(ids) - said)

        whole = [out.text for out in detokenizer.outs() if out.req_id == 1]
        assert [out.text for out in detokenizer.outs() if out.req_id == 2] == whole[said:]

    check(scenario, tmp_path)


def test_a_stop_string_ends_the_request_and_aborts_it_in_the_router(tmp_path: Path) -> None:
    async def scenario(detokenizer: Detokenizer) -> None:
        ids = detokenizer.tokenizer.encode("one two three four", add_special_tokens=False)
        detokenizer.send(new=[text_req(1, stop=("o thr",)), text_req(2, stop=("o thr",), include_stop=True)])
        for token_id in ids:
            detokenizer.send(TokenIdOut(1, Token(token_id)), TokenIdOut(2, Token(token_id)))

        # aborts and texts come through two sockets
        await until(
            lambda: len(detokenizer.aborts) == sum(out.finish_reason is not None for out in detokenizer.outs()) == 2
        )

        first = [out for out in detokenizer.outs() if out.req_id == 1]
        second = [out for out in detokenizer.outs() if out.req_id == 2]
        assert "".join(out.text for out in first) == "one tw"
        assert "".join(out.text for out in second) == "one two thr"
        assert first[-1].finish_reason is FinishReason.STOP
        assert first[-1].stop_reason == "o thr"
        assert detokenizer.aborts == [AbortReq(1, FinishReason.STOP), AbortReq(2, FinishReason.STOP)]
        assert detokenizer.manager.num_open == 0

    check(scenario, tmp_path)


def test_the_end_token_is_in_the_text_only_with_include_stop(tmp_path: Path) -> None:
    async def scenario(detokenizer: Detokenizer) -> None:
        word, end = (detokenizer.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("word", " end"))
        detokenizer.send(new=[text_req(1), text_req(2, include_stop=True)])
        detokenizer.send(TokenIdOut(1, Token(word)), TokenIdOut(2, Token(word)))
        ends = [TokenIdOut(i, Token(end), finish_reason=FinishReason.STOP, stop_reason=end) for i in (1, 2)]
        detokenizer.send(*ends)

        await until(lambda: len(detokenizer.outs()) == 4)

        texts = {i: "".join(out.text for out in detokenizer.outs() if out.req_id == i) for i in (1, 2)}
        assert texts == {1: "word", 2: "word end"}
        assert detokenizer.outs()[-1].stop_reason == end

    check(scenario, tmp_path)


def test_special_tokens_are_skipped_except_shown_special_ids(tmp_path: Path) -> None:
    text = "<|im_start|>日<|im_end|>本<|im_start|>"

    async def scenario(detokenizer: Detokenizer) -> None:
        ids = detokenizer.tokenizer.encode(text, add_special_tokens=False)
        start = detokenizer.tokenizer.token_to_id("<|im_start|>")
        assert start is not None
        detokenizer.send(new=[TextReq(1, TextParams(shown_special_ids=(start,)))])
        for token_id in ids:
            detokenizer.send(TokenIdOut(1, Token(token_id)))

        await until(lambda: len(detokenizer.outs()) == len(ids))

        assert detokenizer.text() == text.replace("<|im_end|>", "")

    check(scenario, tmp_path)


def test_each_http_process_gets_its_own_requests_and_all_get_heartbeats(tmp_path: Path) -> None:
    async def scenario(detokenizer: Detokenizer) -> None:
        detokenizer.send(new=[text_req(1), text_req(SECOND + 1)])
        detokenizer.send(TokenIdOut(1, Token(400)), TokenIdOut(SECOND + 1, Token(401)))
        detokenizer.send(failed=[ReqFailed(SECOND + 1, 429, "full")])
        stats = RouterStats(0.0, MetricsSnapshot())
        detokenizer.inbox.send(stats)

        await until(lambda: all(stats in received for received in detokenizer.received))

        assert [out.token.id for out in detokenizer.outs(0)] == [400]
        assert [out.token.id for out in detokenizer.outs(1)] == [401]
        assert BatchStrOut([], [ReqFailed(SECOND + 1, 429, "full")]) in detokenizer.received[1]
        assert detokenizer.manager.num_open == 1

    check(scenario, tmp_path)


def test_text_goes_to_the_http_process_that_replaces_another_one(tmp_path: Path) -> None:
    async def scenario(detokenizer: Detokenizer) -> None:
        replacement = 5 << REQ_ID_BITS  # of the second of two: 1, 3, 5

        detokenizer.send(TokenIdOut(replacement, Token(400)), new=[text_req(replacement)])
        detokenizer.inbox.send(Timelines(replacement, []))
        await until(lambda: len(detokenizer.received[1]) == 2)

        assert [out.req_id for out in detokenizer.outs(1)] == [replacement]
        assert detokenizer.received[1][1] == Timelines(replacement, [])

    check(scenario, tmp_path)


def test_tokens_of_an_aborted_request_are_dropped(tmp_path: Path) -> None:
    async def scenario(detokenizer: Detokenizer) -> None:
        detokenizer.send(new=[text_req(1), text_req(2)])
        detokenizer.send(aborted=[1])
        detokenizer.send(TokenIdOut(1, Token(400)), TokenIdOut(2, Token(401)))

        await until(lambda: bool(detokenizer.outs()))

        assert [out.req_id for out in detokenizer.outs()] == [2]

    check(scenario, tmp_path)


def test_a_last_token_that_is_not_an_end_token_stays_in_the_text(tmp_path: Path) -> None:
    async def scenario(detokenizer: Detokenizer) -> None:
        first, last = detokenizer.tokenizer.encode("yes no")
        new = [text_req(0), text_req(SECOND)]

        detokenizer.send(TokenIdOut(0, Token(first)), TokenIdOut(SECOND, Token(first)), new=new)
        detokenizer.send(
            TokenIdOut(0, Token(last), finish_reason=FinishReason.STOP, is_text_token=True),
            TokenIdOut(SECOND, Token(last), finish_reason=FinishReason.STOP),
        )
        await until(lambda: detokenizer.manager.num_open == 0 and len(detokenizer.outs(1)) == 2)

        assert detokenizer.text(0) == "yes no"
        assert detokenizer.text(1) == "yes"

    check(scenario, tmp_path)


def test_the_last_token_of_a_request_brings_its_drafts(tmp_path: Path) -> None:
    """Also if a stop string ends it, which the router does not know."""

    async def scenario(detokenizer: Detokenizer) -> None:
        ids = detokenizer.tokenizer.encode("one two three", add_special_tokens=False)
        detokenizer.send(new=[text_req(1, stop=("three",)), text_req(2)])
        for place, token_id in enumerate(ids):
            drafts = DraftColumns(int64s([1, 3]), int32s([4, 9]), int32s([place, 9]))
            outs = [TokenIdOut(req_id, Token(token_id)) for req_id in (1, 2)]
            detokenizer.inbox.send(BatchTokenIdOut(outs, drafts=drafts))
        detokenizer.send(TokenIdOut(2, Token(ids[0]), FinishReason.LENGTH))

        await until(lambda: sum(out.finish_reason is not None for out in detokenizer.outs()) == 2)

        assert len(ids) == 3
        last = {out.req_id: out.drafts for out in detokenizer.outs() if out.finish_reason is not None}
        assert last == {1: RequestDrafts(0 + 1 + 2, 12 - 3), 2: None}
        assert all(out.drafts is None for out in detokenizer.outs() if out.finish_reason is None)

    check(scenario, tmp_path)


def test_plain_tokens_have_the_texts_and_stops_of_detailed_ones(tmp_path: Path) -> None:
    texts = [TextParams(), TextParams(stop=("fox ju",)), TextParams(hidden_chars=7), TextParams(shown_special_ids=(2,))]
    plain_ids, detailed_ids = range(4), range(SECOND, SECOND + 4)

    async def scenario(detokenizer: Detokenizer) -> None:
        def ended(http: int) -> int:
            return sum(out.finish_reason is not None for out in detokenizer.outs(http))

        req_ids = [*plain_ids, *detailed_ids]
        detokenizer.send(new=[TextReq(req_id, text) for req_id, text in zip(req_ids, texts * 2, strict=True)])
        for token_id in [*detokenizer.tokenizer.encode("The 狐 and the fox jump over it"), 2]:
            detailed = [TokenIdOut(req_id, Token(token_id)) for req_id in detailed_ids]
            plain = TokenColumns.of([(req_id, [token_id]) for req_id in plain_ids])
            detokenizer.inbox.send(BatchTokenIdOut(detailed, plain=plain))
        detokenizer.send(*(TokenIdOut(req_id, Token(2), FinishReason.STOP) for req_id in req_ids))
        await until(lambda: ended(0) == ended(1) == 4 and len(detokenizer.aborts) == 2)

        plain_outs, outs = detokenizer.outs(0), detokenizer.outs(1)
        assert plain_outs == [msgspec.structs.replace(out, req_id=out.req_id - SECOND) for out in outs]
        assert {out.stop_reason for out in plain_outs} == {None, "fox ju"}

    check(scenario, tmp_path)
