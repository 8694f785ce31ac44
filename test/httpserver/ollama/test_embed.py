"""Ollama's embeddings, beside those of OpenAI's endpoint of the same server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test.httpserver.fake_engine import FakeEngine
from test.httpserver.pooling.test_routes import EMBED, Post, posted, with_pooling


def test_embed_gives_the_vectors_of_the_other_endpoint(tmp_path: Path) -> None:
    async def check(post: Post, fake: FakeEngine) -> None:
        texts = ["w5 w6", "w7"]
        expected = (await post("/v1/embeddings", json={"input": texts})).json()
        answer = (await post("/api/embed", json={"input": texts, "keep_alive": "5m", "options": {}})).json()
        short = (await post("/api/embed", json={"input": "w7", "dimensions": 2})).json()

        assert np.allclose(answer["embeddings"], [item["embedding"] for item in expected["data"]])
        assert answer["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
        assert [len(vector) for vector in short["embeddings"]] == [2]
        assert np.allclose(np.linalg.norm(short["embeddings"], axis=1), 1)

    with_pooling(tmp_path, EMBED, check)


def test_the_older_endpoint_gives_one_vector_as_it_was_computed(tmp_path: Path) -> None:
    async def check(post: Post, fake: FakeEngine) -> None:
        vector = (await post("/api/embeddings", json={"prompt": "w5 w6"})).json()["embedding"]
        (plain,) = (await post("/v1/embeddings", json={"input": "w5 w6", "normalize": False})).json()["data"]

        assert np.allclose(vector, plain["embedding"])

    with_pooling(tmp_path, EMBED, check)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/api/embed", {"input": []}, "input"),
        ("/api/embed", {"input": "w5", "dimensions": 99}, "dimensions is 99; the model has 4"),
        ("/api/embed", {"input": "w5 " * 2000, "truncate": False}, "maximum context length"),
        ("/api/embed", {"input": "w5", "model": "other"}, "other"),
        ("/api/embeddings", {"prompt": 5}, "prompt"),
    ],
)
def test_a_wrong_body_is_refused(tmp_path: Path, path: str, body: dict[str, Any], message: str) -> None:
    status, answer = posted(tmp_path, EMBED, path, body)

    assert status in (400, 404)
    assert message in answer["error"]


def test_a_model_that_generates_says_so(tmp_path: Path) -> None:
    status, answer = posted(tmp_path, None, "/api/embed", {"input": "w5"})

    assert (status, "--task embed" in answer["error"]) == (400, True)
