"""``LLM.embed``, ``LLM.score`` and ``LLM.classify``: the methods of LLM for models that compute no text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from lightserve.errors import InvalidRequestError, ServerError, TextTooLongError
from lightserve.messages.int_arrays import int32s
from lightserve.messages.params import GenerationParams
from lightserve.model_files.pooling import PoolingConfig
from lightserve.model_files.pooling.results import (
    Vector,
    cosine,
    embedding,
    max_sim,
    pair_score,
    probabilities,
    token_vectors,
    vector_of,
)
from lightserve.model_files.pooling.texts import InputType, PoolingTexts
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from lightserve.offline.steps import OfflineSteps
from lightserve.router.req import Req

ONE_RESULT = GenerationParams.of(max_new_tokens=1)


class PoolingMethods(OfflineSteps):
    """What LLM adds to this: it loads the model."""

    pooling: PoolingConfig | None  # None: it generates text
    _ids: itertools.count[int]

    @property
    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError

    def embed(
        self,
        texts: str | Sequence[Any],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        truncate: bool = False,
    ) -> list[Vector]:
        """A vector for each text or list of token ids. ``prompt_name``: a prompt of the model's files."""
        self._check_task("embed")
        many = [texts] if isinstance(texts, str) else list(texts)
        ids = [self._text_ids(text, prompt_name) for text in many]
        return [embedding(vector, dimensions, normalize) for vector in self._pool(ids, truncate)]

    def token_embed(
        self, texts: str | Sequence[Any], *, input_type: InputType = "document", truncate: bool = False
    ) -> list[Vector]:
        """``[tokens, size]`` for each text: a vector for each token. Token ids are computed as they are."""
        self._check_task("token_embed")
        many = [texts] if isinstance(texts, str) else list(texts)
        limit = self.worker.longest_request if truncate else None
        ids = [
            self._texts.encode_for_tokens(text, input_type, limit)
            if isinstance(text, str)
            else self._text_ids(text, None)
            for text in many
        ]
        of_tokens = [token_vectors(values, self._config.size) for values in self._pool(ids, truncate)]
        return [
            vectors[self._texts.have_vectors(of_text, input_type)] if isinstance(text, str) else vectors
            for text, of_text, vectors in zip(many, ids, of_tokens, strict=True)
        ]

    def classify(self, texts: str | Sequence[Any], *, truncate: bool = False) -> list[Vector]:
        """The probability of each label, for each text. The labels are in ``self.pooling.labels``."""
        self._check_task("classify")
        many = [texts] if isinstance(texts, str) else list(texts)
        vectors = self._pool([self._text_ids(text, None) for text in many], truncate)
        return [probabilities(self._config, vector) for vector in vectors]

    def reward(self, texts: str | Sequence[Any], *, truncate: bool = False) -> list[float]:
        """The number that a reward model gives to each text."""
        self._check_task("reward", "classify", "score")
        many = [texts] if isinstance(texts, str) else list(texts)
        return [float(vector[0]) for vector in self._pool([self._text_ids(text, None) for text in many], truncate)]

    def score(
        self, query: str, documents: str | Sequence[str], *, instruction: str | None = None, truncate: bool = False
    ) -> list[float]:
        """How well each document answers the query: 0 to 1 by a scoring model, the cosine by an embedding model.

        The score of a regression is its number, that of vectors of tokens the sum of late interaction.
        """
        many = [documents] if isinstance(documents, str) else list(documents)
        if self._config.task == "embed":
            first, *others = self.embed([query, *many], normalize=False, truncate=truncate)
            return [cosine(first, vector) for vector in others]
        if self._config.task == "token_embed":
            (first,) = self.token_embed(query, input_type="query", truncate=truncate)
            return [max_sim(first, vectors) for vectors in self.token_embed(many, truncate=truncate)]
        if not self._config.is_pair_scorer:
            raise InvalidRequestError("score: the model has several labels; use classify")
        limit = self._engine.max_req_total_len if truncate else None
        ids = [self._texts.encode_pair(query, document, instruction, limit) for document in many]
        return [pair_score(self._config, vector) for vector in self._pool(ids, truncate=False)]

    @property
    def _config(self) -> PoolingConfig:
        if self.pooling is None:
            raise InvalidRequestError('this model generates text; LLM(..., task="embed") makes it embed')
        return self.pooling

    @cached_property
    def _texts(self) -> PoolingTexts:
        return PoolingTexts(self._config, self.tokenizer, self._engine.vocab_size)

    def _check_generates(self) -> None:
        if self.pooling is not None:
            raise InvalidRequestError(f"this model generates no text; its task is {self.pooling.task}")

    def _check_task(self, *tasks: str) -> None:
        if self._config.task not in tasks:
            raise InvalidRequestError(f"the task of this model is {self._config.task}, not {tasks[0]}")

    def _text_ids(self, text: Any, prompt_name: str | None) -> list[int]:
        if isinstance(text, str):
            return self._texts.encode(text, prompt_name)
        vocab_size = self._engine.vocab_size
        ids = [int(token_id) for token_id in text]
        if not all(0 <= token_id < vocab_size for token_id in ids):
            raise InvalidRequestError(f"token ids must be in 0..{vocab_size - 1}")
        return ids

    def _pool(self, texts: Sequence[list[int]], truncate: bool) -> list[Vector]:
        reqs = [self._pooling_request(ids, truncate) for ids in texts]
        for req in reqs:
            self._scheduler.add(req)
        pending = {req.req_id for req in reqs}
        try:
            while pending:
                self._step()
                pending -= self._embeddings.keys() | self._failures.keys()
            failed = [self._failures[req.req_id] for req in reqs if req.req_id in self._failures]
            if failed:
                raise ServerError(failed[0])
            return [vector_of(self._embeddings[req.req_id]) for req in reqs]
        finally:
            for req in reqs:
                self._scheduler.abort(req.req_id)
                self._embeddings.pop(req.req_id, None)
                self._failures.pop(req.req_id, None)

    def _pooling_request(self, ids: list[int], truncate: bool) -> Req:
        limit, limits = self._engine.max_req_total_len, self._engine.pooling
        if not ids:
            raise InvalidRequestError("the text is empty")
        ids = self._texts.truncate(ids, limit) if truncate else ids
        if len(ids) > limit:
            raise TextTooLongError(len(ids), limit)
        shares_prefix = limits is not None and limits.shares_prefix
        return Req(
            next(self._ids),
            int32s(ids),
            ONE_RESULT,
            max_new_tokens=1,
            eos_ids=(),
            keeps_kv_cached=shares_prefix,
            shares_prefix=shares_prefix,
        )
