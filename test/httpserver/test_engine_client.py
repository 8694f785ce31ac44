"""The HTTP process's side of the engine, over real channels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from lightserve.errors import (
    AbortedError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    SlowReaderError,
    UnavailableError,
)
from lightserve.httpserver import engine_client as manager
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import EngineState, PromptRequest
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.messages.output import MetricsSnapshot, RouterStats, StrOut
from lightserve.messages.params import FinishReason, GenerationParams
from lightserve.messages.request import REQ_ID_BITS, GenerateReq
from lightserve.messages.step import ReqFailed, Token
from test.httpserver.fake_engine import LIMITS, FakeEngine, Script, engine, spell
from test.waiting import DEADLINE_S, until

REQUEST = PromptRequest([1, 2, 3], GenerationParams.of(max_new_tokens=8, seed=5))


def check(
    scenario: Callable[[ServerContext, FakeEngine], Awaitable[None]], run_dir: Path, script: Script | None = None
) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            engine(run_dir, script or spell("hello"), None) as (context, fake),
        ):
            await scenario(context, fake)

    asyncio.run(run())


def log() -> AccessLog:
    return AccessLog("r1", "/test")


async def texts(
    context: ServerContext, *prompt_requests: PromptRequest, n: int = 1, line: AccessLog | None = None
) -> list[str]:
    found = [""] * (len(prompt_requests) * n)
    async with context.manager.generate(prompt_requests, line or log(), n) as generation:
        async for outs in generation:
            for index, out in outs:
                found[index] += out.text
    return found


def test_every_choice_of_every_prompt_gets_its_text(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        line = log()

        found = await texts(context, REQUEST, PromptRequest([4], GenerationParams.of()), n=3, line=line)

        assert found == ["hello"] * 6
        assert [req.prompt_ids for req in fake.received] == [[1, 2, 3]] * 3 + [[4]] * 3
        assert line.output_tokens == 30
        assert line.cached_tokens == 4  # a prompt's cached tokens count once, not once a choice

    check(scenario, tmp_path)


def test_choices_of_one_seed_differ_and_are_reproducible(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        await texts(context, REQUEST, n=3)

        assert [req.params.sampling.seed for req in fake.received] == [5, 6, 7]

    check(scenario, tmp_path)


def test_a_caller_that_does_not_read_loses_its_request_and_frees_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "MAX_UNREAD", 3)

    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        async with context.manager.generate([REQUEST], log()) as generation:
            await until(lambda: not generation._unfinished)

            assert not generation.unread.outs
            with pytest.raises(SlowReaderError, match="left more than 3 tokens unread"):
                await anext(generation)

        monkeypatch.undo()
        assert await texts(context, REQUEST) == ["hello"]

    check(scenario, tmp_path)


def test_choices_that_ended_in_another_server_are_not_started_again(tmp_path: Path) -> None:
    def out(char: str, finish_reason: FinishReason | None = None) -> StrOut:
        return StrOut(0, char, Token(ord(char)), finish_reason=finish_reason)

    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        generation = context.manager.generate([REQUEST], log(), n=3)
        generation.continue_after([(0, out("h")), (2, out("h")), (2, out("e")), (0, out("e", FinishReason.STOP))], 1.0)

        found = await generation.collect()

        assert ["".join(one.text for one in outs) for outs in found] == ["", "hello", "llo"]
        assert fake.begun_at == [0, 2]
        assert [req.params.sampling.seed for req in fake.received] == [6, 7]
        assert fake.aborted == []
        assert context.manager.running_requests == 0

    check(scenario, tmp_path)


def test_a_caller_that_leaves_aborts_its_request(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        fake.hold.clear()
        async with context.manager.generate([REQUEST, REQUEST], log()) as generation:
            await anext(generation)

        await until(lambda: len(fake.aborted) == 2)

        assert set(fake.aborted) == {req.req_id for req in fake.received}
        assert context.manager.running_requests == 0

    check(scenario, tmp_path)


def test_a_finished_request_is_not_aborted(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        await texts(context, REQUEST)
        fake.hold.clear()
        async with context.manager.generate([REQUEST], log()) as generation:
            await anext(generation)

        await until(lambda: bool(fake.aborted))

        assert fake.aborted == [fake.received[1].req_id]

    check(scenario, tmp_path)


def test_text_that_arrives_in_a_burst_is_kept(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        async with context.manager.generate([REQUEST], log()) as generation:
            await until(lambda: not generation._unfinished)

            outs = await anext(generation)

            assert "".join(out.text for _, out in outs) == "hello"
            with pytest.raises(StopAsyncIteration):
                await anext(generation)

    check(scenario, tmp_path)


def test_a_refused_request_has_the_status_of_its_error(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        with pytest.raises(OverloadedError, match="full"):
            await texts(context, REQUEST)

    def refuse(req: GenerateReq) -> list[ReqFailed]:
        return [ReqFailed(req.req_id, 429, "full")]

    check(scenario, tmp_path, refuse)


def test_a_dead_engine_ends_every_request(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        fake.hold.clear()
        waiting = asyncio.create_task(texts(context, REQUEST))
        await until(lambda: bool(fake.received))

        context.manager.engine_died("the router died")

        with pytest.raises(UnavailableError, match="the router died"):
            await waiting
        with pytest.raises(UnavailableError, match="the router died"):
            await texts(context, REQUEST)

    check(scenario, tmp_path)


def test_draining_finishes_running_requests_and_refuses_new_ones(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        fake.hold.clear()
        running = asyncio.create_task(texts(context, REQUEST))
        await until(lambda: bool(fake.received))

        context.manager.drain()
        with pytest.raises(UnavailableError, match="shutting down"):
            await texts(context, REQUEST)
        fake.hold.set()

        assert await running == ["hello"]
        await context.manager.wait_drained()

    check(scenario, tmp_path)


def test_an_operator_can_abort_by_request_id(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        fake.hold.clear()
        one = asyncio.create_task(texts(context, REQUEST, line=AccessLog("one", "/")))
        two = asyncio.create_task(texts(context, REQUEST, line=AccessLog("two", "/")))
        await until(lambda: len(fake.received) == 2)

        context.manager._abort_own_requests("one")

        with pytest.raises(AbortedError):
            await one
        fake.hold.set()
        assert await two == ["hello"]

    check(scenario, tmp_path)


def test_a_client_aborts_only_its_own_requests(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        fake.hold.clear()
        lines = [AccessLog("same", "/") for _ in "ab"]
        lines[0].owner, lines[1].owner = "a", "b"
        first, second = (asyncio.create_task(texts(context, REQUEST, line=line)) for line in lines)
        await until(lambda: len(fake.received) == 2)

        context.manager._abort_own_requests("same", "b")
        context.manager._abort_own_requests(None, "c")

        with pytest.raises(AbortedError):
            await second
        fake.hold.set()
        assert await first == ["hello"]

    check(scenario, tmp_path)


def test_a_prompt_must_leave_room_for_its_output(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        limit = LIMITS.max_req_total_len
        new_tokens = context.manager.max_new_tokens

        assert new_tokens(10, None) == limit - 10
        assert new_tokens(limit - 1, None) == 1
        assert new_tokens(10, limit - 10) == limit - 10
        openai_words = f"^This model's maximum context length is {limit} tokens: "
        told = r"prompt 10 \+ max_output_tokens 1015 > 1024; use max_output_tokens <= 1014$"
        with pytest.raises(PromptTooLongError, match=f"{openai_words}the prompt has {limit} tokens.*{limit - 1}"):
            new_tokens(limit, None)
        with pytest.raises(PromptTooLongError, match=f"{openai_words}{told}") as error:
            new_tokens(10, 1015, "max_output_tokens")
        assert error.value.param == "max_output_tokens"

    check(scenario, tmp_path)


def test_health_follows_the_state_of_the_engine(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        manager = context.manager
        assert manager.unhealthy_reason() is None

        manager.stats = RouterStats(step_age_s=61.0, metrics=MetricsSnapshot())
        assert manager.unhealthy_reason() == "a step has been running for 61 s"
        manager.stats = RouterStats(step_age_s=59.0, metrics=MetricsSnapshot())
        assert manager.unhealthy_reason() is None
        manager.stats = RouterStats(0.0, MetricsSnapshot(), has_workers=False)
        assert manager.unhealthy_reason() == "the model worker died; another one is starting, and requests wait for it"
        manager._last_heartbeat_s -= 6.0
        assert manager.unhealthy_reason() == "the engine does not answer"
        manager.state = EngineState.LOADING
        assert manager.unhealthy_reason() == "the model is loading"

    check(scenario, tmp_path)


def test_req_ids_of_different_processes_differ(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        await texts(context, REQUEST)

        assert fake.received[0].req_id >> REQ_ID_BITS == 0

    check(scenario, tmp_path)


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([5, 49152], "token id 49152 is"),
        ([-1, 49152, -1, 7], "token ids -1, 49152 are"),
        (
            [*range(49152, 50000)],
            "token ids 49152, 49153, 49154, 49155, 49156, 49157, 49158, 49159, 49160, 49161 and 838",
        ),
    ],
)
def test_token_ids_out_of_range_are_named(tmp_path: Path, ids: list[int], found: str) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        with pytest.raises(InvalidRequestError, match=f"^logit_bias: {found}.* not in the range 0..49151$"):
            context.manager.check_ids("logit_bias", ids)

    check(scenario, tmp_path)
