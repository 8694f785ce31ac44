"""A vector for each token, and the scores of late interaction, against their definition over transformers' models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from lightserve.errors import InvalidRequestError, ModelFilesError
from lightserve.offline.llm import LLM
from test.pooling.files import CLS, SEP, new_model, save
from test.pooling.late_interaction import DOT, QUERY_LENGTH, SIZE, ColBert, pylate, stanford, text_of
from test.pooling.test_parity import KV, ON, TOLERANCE

Make = Callable[[Path, bool], ColBert]
QUERY = [20, 21, 22]
DOCUMENTS = [[20, 21], [30, DOT, 31, DOT], [*range(10, 60)]]
LONG_QUERY = [*range(40, 40 + QUERY_LENGTH)]


@pytest.mark.parametrize("sees_masks", [False, True], ids=["masks unseen", "masks seen"])
@pytest.mark.parametrize("make", [stanford, pylate])
def test_vectors_and_scores_are_those_of_the_definition(tmp_path: Path, make: Make, sees_masks: bool) -> None:
    definition = make(tmp_path, sees_masks)
    llm = LLM(str(tmp_path), **ON)

    queries = llm.token_embed([text_of(QUERY), text_of(LONG_QUERY)], input_type="query")
    documents = llm.token_embed([text_of(document) for document in DOCUMENTS])
    scores = llm.score(text_of(QUERY), [text_of(document) for document in DOCUMENTS])

    assert queries[0].shape == (QUERY_LENGTH, SIZE)
    assert queries[1].shape == (QUERY_LENGTH + 3, SIZE)  # longer ones are not cut
    for found, words in zip(queries, [QUERY, LONG_QUERY], strict=True):
        np.testing.assert_allclose(found, definition.query(words), atol=TOLERANCE)
    for found, words in zip(documents, DOCUMENTS, strict=True):
        np.testing.assert_allclose(found, definition.document(words), atol=TOLERANCE)
    expected = [definition.score(QUERY, document) for document in DOCUMENTS]
    np.testing.assert_allclose(scores, expected, atol=QUERY_LENGTH * TOLERANCE)


def test_token_ids_are_computed_as_they_are_and_texts_are_cut_where_asked(tmp_path: Path) -> None:
    definition = stanford(tmp_path)
    llm = LLM(str(tmp_path), **ON)

    (of_ids,) = llm.token_embed([[CLS, 20, DOT, SEP]])
    (cut,) = llm.token_embed([text_of([*range(10, 100)])], truncate=True)

    np.testing.assert_allclose(of_ids, definition.vectors([CLS, 20, DOT, SEP]), atol=TOLERANCE)
    np.testing.assert_allclose(cut, definition.document([*range(10, 67)]), atol=TOLERANCE)  # 60 tokens: doc_maxlen
    with pytest.raises(InvalidRequestError, match="the task of this model is token_embed, not embed"):
        llm.embed("w20")


def test_any_encoder_has_vectors_of_tokens_where_asked(tmp_path: Path) -> None:
    model = new_model(AutoModel, "bert", type_vocab_size=2)
    llm = LLM(str(save(model, tmp_path)), **ON, task="token_embed")

    (found,) = llm.token_embed("w20 w21")

    definition = ColBert(model, torch.eye(48))
    np.testing.assert_allclose(found, definition.vectors([CLS, 20, 21, SEP]), atol=TOLERANCE)


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    causal = str(save(new_model(AutoModel, "llama", **KV), tmp_path))
    with pytest.raises(ModelFilesError, match="it needs an encoder"):
        LLM(causal, **ON, task="token_embed")
    (colbert := tmp_path / "colbert").mkdir()
    pylate(colbert)
    with pytest.raises(ModelFilesError, match="--task embed: the model was trained for a vector for each token"):
        LLM(str(colbert), **ON, task="embed")
    with pytest.raises(ModelFilesError, match="--pooling mean: the vectors of tokens are not pooled"):
        LLM(str(colbert), **ON, pooling="mean")
    settings = colbert / "config_sentence_transformers.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"query_length": "long"}))
    with pytest.raises(ModelFilesError, match="query_length is 'long', wanted a positive integer"):
        LLM(str(colbert), **ON)
