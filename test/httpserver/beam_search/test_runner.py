"""Beam search through the HTTP process's side of the engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from lightserve.errors import AbortedError, PromptTooLongError
from lightserve.httpserver.beam_search import run_beam_search
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import EngineState
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.prompt_request import PromptRequest
from lightserve.messages.output import Admission, StrOut
from lightserve.messages.params import FinishReason, GenerationParams
from lightserve.messages.request import GenerateReq
from lightserve.messages.step import ReqFailed, Token
from lightserve.text.beam_search import BeamParams
from test.httpserver.fake_engine import LIMITS, FakeEngine, engine
from test.waiting import DEADLINE_S, until

END = 0
LIMITS_WITH_END = msgspec.structs.replace(LIMITS, eos_token_ids=(END,))
LOGPROBS = {(): [1e-9, 0.6, 0.4], (1,): [0.4, 0.3, 0.3], (2,): [0.9, 0.05, 0.05]}  # after the prompt [7]
PARAMS = BeamParams(num_beams=2, n=2, max_new_tokens=2, early_stopping="never")


def toy(req: GenerateReq) -> list[StrOut | ReqFailed]:
    """The most likely of three tokens, as many as requested."""
    row = LOGPROBS[tuple(req.prompt_ids[1:])]
    top = sorted(((token, math.log(p)) for token, p in enumerate(row)), key=lambda pair: -pair[1])
    token, logprob = top[0]
    reason = FinishReason.STOP if token == END else FinishReason.LENGTH
    wanted = top[: req.params.sampling.logprobs]
    return [
        StrOut(
            req.req_id,
            "x",
            Token(token, logprob=logprob, top_logprobs=wanted),
            finish_reason=reason,
            admission=Admission(0.001, 3),
        )
    ]


def silent_at_the_second_step(req: GenerateReq) -> list[StrOut | ReqFailed]:
    return toy(req) if len(req.prompt_ids) == 1 else []


def check(
    scenario: Callable[[ServerContext, FakeEngine], Awaitable[None]],
    run_dir: Path,
    script: Callable[[GenerateReq], list[StrOut | ReqFailed]] = toy,
) -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), engine(run_dir, script, None) as (context, fake):
            context.manager.engine_info(LIMITS_WITH_END)
            await scenario(context, fake)

    asyncio.run(run())


def prompts(*ids: list[int]) -> list[PromptRequest]:
    return [PromptRequest(each, GenerationParams()) for each in ids]


def log() -> AccessLog:
    return AccessLog("r1", "/test")


def test_the_engine_generates_one_token_for_every_beam(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        line = log()

        [found] = await run_beam_search(context, prompts([7]), PARAMS, line)

        assert [beam.token_ids for beam in found] == [[2, END], [1, END]]
        assert [beam.score for beam in found] == pytest.approx([math.log(0.4 * 0.9) / 2, math.log(0.6 * 0.4) / 2])
        assert {beam.finish_reason for beam in found} == {FinishReason.STOP}
        assert [req.prompt_ids for req in fake.received] == [[7], [7, 1], [7, 2]]
        assert fake.num_sent_ids == 3  # the parents of the others have the rest
        assert {(req.params.stopping.max_new_tokens, req.params.sampling.logprobs) for req in fake.received} == {(1, 3)}
        assert {req.arrived_s for req in fake.received} == {line.arrived_s}
        assert (line.output_tokens, line.cached_tokens) == (4, 3)  # of what is returned; of the prompt
        assert context.manager.running_requests == 0
        await until(lambda: not fake.parents)
        assert not fake.aborted

    check(scenario, tmp_path)


def test_prompts_are_searched_together(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        found = await run_beam_search(context, prompts([7], [8]), PARAMS, log())

        assert [[beam.token_ids for beam in beams] for beams in found] == [[[2, END], [1, END]]] * 2
        assert [req.prompt_ids for req in fake.received] == [[7], [8], [7, 1], [7, 2], [8, 1], [8, 2]]
        assert fake.num_sent_ids == 6

    check(scenario, tmp_path)


def test_a_beam_search_writes_one_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        await run_beam_search(context, prompts([7]), PARAMS, log())

    with caplog.at_level("INFO", "lightserve.access"):
        check(scenario, tmp_path)

    [line] = [record.getMessage() for record in caplog.records if record.name == "lightserve.access"]
    assert "cached=3 output=4" in line
    assert line.endswith("finish=stop*2")


def test_a_cancelled_beam_search_aborts_its_beams(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        search = asyncio.create_task(run_beam_search(context, prompts([7]), PARAMS, log()))
        await until(lambda: len(fake.received) == 3)

        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search

        await until(lambda: len(fake.aborted) == 2)
        assert set(fake.aborted) == {req.req_id for req in fake.received[1:]}
        await until(lambda: not fake.parents)
        assert context.manager.running_requests == 0

    check(scenario, tmp_path, silent_at_the_second_step)


@pytest.mark.parametrize("num_tokens", [3, 12])
def test_a_step_sends_one_token_a_beam_and_names_parents_of_the_last_step(tmp_path: Path, num_tokens: int) -> None:
    def any_token(req: GenerateReq) -> list[StrOut | ReqFailed]:
        top = [(token, -1.0 - token / 8) for token in (1, 2, 3)]
        return [StrOut(req.req_id, "x", Token(1, logprob=-1.0, top_logprobs=top), finish_reason=FinishReason.LENGTH)]

    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        [found] = await run_beam_search(
            context, prompts([7] * 100), BeamParams(num_beams=2, max_new_tokens=num_tokens), log()
        )

        assert found[0].token_ids == [1] * num_tokens
        assert fake.num_sent_ids == 100 + 2 * (num_tokens - 1)
        assert len(fake.received) == 1 + 2 * (num_tokens - 1)
        await until(lambda: not fake.parents)
        assert fake.most_parents <= 3 * 2  # of three steps: those before are released

    check(scenario, tmp_path, any_token)


def test_a_beam_search_can_be_aborted_by_its_request_id(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        search = asyncio.create_task(run_beam_search(context, prompts([7]), PARAMS, log()))
        await until(lambda: len(fake.received) == 3)

        context.manager._abort_own_requests("r1")

        with pytest.raises(AbortedError):
            await search

    check(scenario, tmp_path, silent_at_the_second_step)


def test_a_drain_waits_for_the_whole_beam_search(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        manager = context.manager

        def drain_then_respond(req: GenerateReq) -> list[StrOut | ReqFailed]:
            if manager.state is EngineState.READY:
                manager.drain()
            return toy(req)

        fake.script = drain_then_respond

        [found] = await run_beam_search(context, prompts([7]), PARAMS, log())

        assert [beam.token_ids for beam in found] == [[2, END], [1, END]]
        await manager.wait_drained()

    check(scenario, tmp_path)


def test_a_prompt_that_fills_the_context_is_refused(tmp_path: Path) -> None:
    async def scenario(context: ServerContext, fake: FakeEngine) -> None:
        with pytest.raises(PromptTooLongError):
            await run_beam_search(context, prompts([7] * LIMITS.max_req_total_len), PARAMS, log())

        assert not fake.received

    check(scenario, tmp_path)
