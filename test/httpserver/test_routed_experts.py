"""Which requests may have the experts of their tokens."""

from __future__ import annotations

import asyncio
import io
import json
from base64 import b64decode
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.routed_experts import PIECE_TOKENS, RoutedExperts, experts_shape
from lightserve.messages.control import RoutedExpertsShape
from lightserve.messages.params import GenerationParams, GrammarSpec
from lightserve.messages.step import Token


def test_they_are_refused_beside_a_grammar() -> None:
    """Tokens that it forces reach the router before anybody has read their experts."""
    shape = object()
    context: Any = SimpleNamespace(manager=SimpleNamespace(limits=SimpleNamespace(routed_experts=shape)))
    assert experts_shape(context, GenerationParams()) is shape

    with pytest.raises(InvalidRequestError, match="return_routed_experts: not with a grammar"):
        experts_shape(context, GenerationParams.of(grammar=GrammarSpec("regex", "a+")))


def of_tokens(count: int) -> tuple[RoutedExperts, Any]:
    """Of a model with 3 layers, of which 2 have experts. They come with the tokens of the prompt, and one by one."""
    rows = np.random.default_rng(1).integers(0, 64, (count, 2, 4)).astype(np.uint8)
    experts = RoutedExperts()
    for part in (rows[:-2], rows[-2:-1], rows[-1:]):
        experts.add(Token(5, routed_experts=part.tobytes()))
    return experts, rows


SHAPE = RoutedExpertsShape(3, (0, 2), 4, 64)


@pytest.mark.parametrize("count", [3, PIECE_TOKENS, 3 * PIECE_TOKENS + 5])
def test_they_are_written_in_pieces_that_are_one_string(count: int) -> None:
    experts, rows = of_tokens(count)

    sglang = b64decode(json.loads(orjson.dumps(experts.for_sglang(SHAPE, 1, count))))
    vllm = b64decode(json.loads(orjson.dumps(experts.for_vllm(SHAPE, 1, count))))

    whole = np.frombuffer(sglang, dtype=np.int32).reshape(-1, 3, 4)
    assert np.array_equal(whole[:, [0, 2]], rows[1:])
    assert not whole[:, 1].any()
    assert np.array_equal(np.load(io.BytesIO(vllm)), rows[1:])


def test_other_requests_go_on_while_a_thread_writes_many() -> None:
    experts, _ = of_tokens(200_000)
    assert experts.are_many
    assert not of_tokens(100)[0].are_many

    async def count_turns() -> int:
        writing, turns = asyncio.create_task(asyncio.to_thread(experts.for_sglang, SHAPE, 0, 200_000)), 0
        while not writing.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(count_turns()) > 10
