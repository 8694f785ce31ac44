"""A server with a ColBERT model: vectors of tokens, scores and rankings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from test.api.server import running_server
from test.pooling.late_interaction import DOT, stanford, text_of

pytestmark = pytest.mark.slow

QUERY, DOCUMENTS = [20, 21], [[30, 31, DOT], [20, 21], [*range(10, 60)], [30, 31, DOT]]


def test_a_colbert_model_is_served(tmp_path: Path) -> None:
    definition = stanford(tmp_path)
    expected = [definition.score(QUERY, document) for document in DOCUMENTS]
    texts = [text_of(document) for document in DOCUMENTS]
    with running_server(tmp_path / "log", "--model_dir", str(tmp_path), "--device", "cpu") as server:
        _, queries = server.post("/pooling", {"input": text_of(QUERY), "input_type": "query", "task": "token_embed"})
        _, documents = server.post("/pooling", {"input": texts})
        _, scores = server.post("/score", {"text_1": text_of(QUERY), "text_2": texts})
        _, ranking = server.post("/v1/rerank", {"query": text_of(QUERY), "documents": texts, "top_n": 2})
        _, of_tei = server.post("/rerank", {"query": text_of(QUERY), "texts": texts})
        _, of_pairs = server.post("/score", {"text_1": [texts[0], texts[1]], "text_2": [texts[1], texts[1]]})
        refused = [
            server.post("/v1/embeddings", {"input": "w20"}),
            server.post("/pooling", {"input": "w20", "task": "embed"}),
            server.post("/score", {"text_1": "w20", "text_2": text_of([*range(10, 100)])}),
        ]

        assert "token_embed (each token, 20 numbers)" in server.log
        np.testing.assert_allclose(queries["data"][0]["data"], definition.query(QUERY), atol=1e-4)
        for found, document in zip(documents["data"], DOCUMENTS, strict=True):
            np.testing.assert_allclose(found["data"], definition.document(document), atol=1e-4)
        np.testing.assert_allclose([found["score"] for found in scores["data"]], expected, atol=1e-3)
        order = sorted(range(4), key=lambda index: -expected[index])
        assert [found["index"] for found in ranking["results"]] == order[:2]
        assert [found["index"] for found in of_tei] == order
        pairs = [definition.score(DOCUMENTS[0], DOCUMENTS[1]), definition.score(DOCUMENTS[1], DOCUMENTS[1])]
        np.testing.assert_allclose([found["score"] for found in of_pairs["data"]], pairs, atol=1e-3)
        assert [status for status, _ in refused] == [400, 400, 400]
        assert "needs a model for embed; the task of this one is token_embed" in refused[0][1]["error"]["message"]
        assert server.stop() == 0
