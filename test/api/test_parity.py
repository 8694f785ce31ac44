"""HTTP gives the model's own output: greedy text, seeds, streamed or not, alone or in a batch."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import openai
import pytest

from lightserve.messages.params import GenerationParams
from lightserve.offline.llm import LLM
from test.api.server import ServerProcess
from test.real_model import GOLDEN_TOKENS, PROMPTS, golden_ids, smollm2_tokenizer

pytestmark = pytest.mark.slow

EXACTLY = {"min_tokens": GOLDEN_TOKENS}


def client_of(server: ServerProcess) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


async def complete(client: openai.AsyncOpenAI, prompt: str, is_streamed: bool, **options: Any) -> str:
    request = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": GOLDEN_TOKENS, **options}
    if not is_streamed:
        return str((await client.completions.create(**request)).choices[0].text)
    stream = await client.completions.create(**request, stream=True)
    return "".join([chunk.choices[0].text async for chunk in stream])


def golden_texts() -> list[str]:
    tokenizer = smollm2_tokenizer()
    return [tokenizer.decode(ids) for ids in golden_ids()]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_greedy_text_of_concurrent_prompts_equals_transformers(exact_server: ServerProcess, is_streamed: bool) -> None:
    order = list(range(len(PROMPTS)))
    random.Random(is_streamed).shuffle(order)

    async def ask_all() -> dict[int, str]:
        async with client_of(exact_server) as client:
            asks = (complete(client, PROMPTS[i], is_streamed, temperature=0, extra_body=EXACTLY) for i in order)
            return dict(zip(order, await asyncio.gather(*asks), strict=True))

    texts = asyncio.run(ask_all())

    assert [texts[i] for i in range(len(PROMPTS))] == golden_texts()


def test_offline_and_http_give_the_same_text(exact_server: ServerProcess) -> None:
    llm = LLM(max_total_token_num=4096, device="cpu", quantization="none")
    params = GenerationParams.of(
        max_new_tokens=GOLDEN_TOKENS, min_new_tokens=GOLDEN_TOKENS, temperature=0.9, top_p=0.95, seed=11
    )

    async def ask() -> list[str]:
        options = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "extra_body": EXACTLY}
        async with client_of(exact_server) as client:
            return [await complete(client, prompt, is_streamed=False, **options) for prompt in PROMPTS[:3]]

    assert asyncio.run(ask()) == [generation.text for generation in llm.generate(PROMPTS[:3], params)]


def test_a_seed_gives_the_same_text_alone_and_in_a_batch(exact_server: ServerProcess) -> None:
    options = {"temperature": 1.0, "seed": 4242, "extra_body": EXACTLY}

    async def ask() -> tuple[str, list[str]]:
        async with client_of(exact_server) as client:
            alone = await complete(client, PROMPTS[1], is_streamed=True, **options)
            others = [
                complete(client, PROMPTS[i % len(PROMPTS)], is_streamed=i % 2 == 0, temperature=1.0, seed=i)
                for i in range(16)
            ]
            return alone, await asyncio.gather(complete(client, PROMPTS[1], is_streamed=False, **options), *others)

    alone, among = asyncio.run(ask())

    assert among[0] == alone
    assert len(set(among)) == len(among)
