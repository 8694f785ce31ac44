"""AsyncLLM: tasks whose requests share steps, errors of one request, tasks that leave, closing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lightserve import LLM, AsyncLLM
from lightserve.errors import InvalidRequestError, LightserveError, ServerError
from lightserve.offline import async_llm

OPTIONS: dict[str, Any] = {"load_format": "dummy", "max_total_token_num": 600, "max_req_total_len": 200}
Check = Callable[[AsyncLLM], Awaitable[None]]


def run(check: Check) -> None:
    async def with_llm() -> None:
        async with AsyncLLM(**OPTIONS) as llm:
            await check(llm)

    asyncio.run(with_llm())


def test_tasks_get_the_texts_of_a_batch() -> None:
    prompts = [[1, 2, 3], [4, 5], [6]]
    with LLM(**OPTIONS) as llm:
        expected = [generation.token_ids for generation in llm.generate(prompts, max_tokens=6, temperature=0)]

    async def check(llm: AsyncLLM) -> None:
        async def streamed(prompt: list[int]) -> list[int | None]:
            return [out.token_id async for out in llm.stream(prompt, max_tokens=6, temperature=0)]

        whole = llm.generate(prompts, max_tokens=6, temperature=0)
        results: list[Any] = list(await asyncio.gather(whole, *map(streamed, prompts)))
        generations, *tokens = results
        assert [generation.token_ids for generation in generations] == expected == tokens
        (answer,) = await llm.chat([{"role": "user", "content": "Hi"}], max_tokens=2)
        assert len(answer.token_ids) <= 2

    run(check)


def test_a_wrong_request_fails_alone_and_a_task_that_leaves_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LLM] = []

    class KnownLLM(LLM):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(async_llm, "LLM", KnownLLM)

    async def check(llm: AsyncLLM) -> None:
        async def leave() -> None:
            async for _ in llm.generate_stream([1, 2], max_tokens=150, ignore_eos=True):
                return

        good = llm.generate([1, 2], max_tokens=4, ignore_eos=True)
        wrong = llm.generate([1, 2], max_tokens=0)
        results: list[Any] = list(await asyncio.gather(good, wrong, leave(), return_exceptions=True))
        assert len(results[0][0].token_ids) == 4
        assert isinstance(results[1], InvalidRequestError)
        await llm.generate([1, 2], max_tokens=2)
        assert made[0]._open == {}

    run(check)


def test_a_closed_llm_refuses_and_a_wrong_folder_is_raised_by_the_constructor() -> None:
    async def use_after_close() -> None:
        llm = AsyncLLM(**OPTIONS)
        waiting = asyncio.create_task(llm.generate([1, 2], max_tokens=190, ignore_eos=True))
        await asyncio.sleep(0)
        await llm.close()
        with pytest.raises(ServerError, match="closed"):
            await waiting
        with pytest.raises(ServerError, match="closed"):
            await llm.generate([1, 2])

    asyncio.run(use_after_close())
    with pytest.raises(LightserveError):
        AsyncLLM("/nowhere")
