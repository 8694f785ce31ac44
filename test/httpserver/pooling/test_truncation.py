"""Truncated pairs over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from test.httpserver.fake_engine import LIMITS, FakeEngine
from test.httpserver.pooling.test_routes import SCORE, Post, with_pooling
from test.pooling.files import SEP

LONG_QUERY = "w5 " * 30


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": LONG_QUERY, "documents": ["w60 w61"], "truncate_prompt_tokens": 16}),
        ("/score", {"text_1": LONG_QUERY, "text_2": "w60 w61", "truncate_prompt_tokens": 16}),
    ],
)
def test_a_long_query_leaves_the_document_in_the_prompt(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async def check(post: Post, fake: FakeEngine) -> None:
        response = await post(path, json=body)

        assert response.status_code == 200
        (received,) = fake.received
        ids = [token_id % LIMITS.vocab_size for token_id in received.prompt_ids]
        assert len(ids) == 16
        assert ids[-4:] == [SEP, 60, 61, SEP]

    with_pooling(tmp_path, SCORE, check)
