"""The limit on the memory of the grammars of running requests."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from lightserve.errors import UnavailableError
from lightserve.httpserver.engine_client import Generation, PromptRequest
from lightserve.httpserver.grammar.memory import MAX_MIB
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.messages.params import GenerationParams, GrammarSpec
from test.httpserver.fake_engine import engine, spell


def grammar(text: str, mib: int) -> GrammarSpec:
    return GrammarSpec("regex", text, memory_mib=mib)


def test_large_grammars_of_running_requests_share_a_limit(tmp_path: Path) -> None:
    half, other, third = (grammar(text, MAX_MIB // 2) for text in "abc")

    async def run() -> None:
        async with engine(tmp_path, spell("x"), None) as (context, fake), AsyncExitStack() as running:
            fake.hold.clear()

            def generation(spec: GrammarSpec) -> Generation:
                params = GenerationParams.of(grammar=spec)
                return context.manager.generate([PromptRequest([1], params)], AccessLog("id", "/", False), n=2)

            first = generation(half)
            await running.enter_async_context(first)
            await running.enter_async_context(generation(half))  # the same one takes no more
            await running.enter_async_context(generation(other))
            with pytest.raises(UnavailableError, match=f"take {3 * MAX_MIB // 2} MiB of memory; the limit"):
                await running.enter_async_context(generation(third))
            for i in range(2 * MAX_MIB):
                await running.enter_async_context(generation(grammar(str(i), 1)))  # small ones do not count

            fake.hold.set()
            await running.aclose()
            await running.enter_async_context(generation(third))

    asyncio.run(run())


def test_a_grammar_counts_until_its_last_request_ends(tmp_path: Path) -> None:
    large, other = grammar("a", MAX_MIB), grammar("b", MAX_MIB)

    async def run() -> None:
        async with engine(tmp_path, spell("x"), None) as (context, _):

            async def collect(spec: GrammarSpec) -> None:
                params = GenerationParams.of(grammar=spec)
                log = AccessLog("id", "/", False)
                await context.manager.generate([PromptRequest([1], params)], log).collect()

            for spec in (large, other, large):
                await collect(spec)

    asyncio.run(run())
