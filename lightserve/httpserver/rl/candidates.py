"""Log probabilities of tokens that might stand in a prompt: a teacher scores those of a student."""

from __future__ import annotations

import io
from base64 import b64encode
from itertools import chain
from typing import Any

import numpy as np
from pydantic import Field

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import Body, validate
from lightserve.messages.params import GenerationParams, PromptCandidates
from lightserve.messages.step import PromptLogprobs

IDS, START = "prompt_logprob_token_ids", "prompt_logprob_start"
NONE = -1  # in place of an id


class CandidateFields(Body):
    """vLLM's names, within sampling_params."""

    prompt_logprob_token_ids: list[list[int]] | None = Field(None, description="a row for each token of the prompt")
    prompt_logprob_start: int | None = Field(None, ge=0, description="the first row is of the token behind this one")


def take_candidates(context: ServerContext, fields: dict[str, Any], prompt_len: int) -> PromptCandidates | None:
    """Out of ``fields``. Row i has tokens that might stand at ``start + i + 1``; None: the request has none."""
    given = {name: value for name in (IDS, START) if (value := fields.pop(name, None)) is not None}
    body = validate(CandidateFields, given)
    rows, start = body.prompt_logprob_token_ids, body.prompt_logprob_start or 0
    if rows is None:
        if given:
            raise InvalidRequestError(f"sampling_params.{START}: needs {IDS}", START)
        return None
    count = max(map(len, rows), default=0)
    if len(rows) != prompt_len - 1 - start or not count:
        numbers = f"{len(rows)} of {count} ids"
        raise InvalidRequestError(
            f"sampling_params.{IDS}: needs {prompt_len - 1 - start} scored rows, found {numbers}", IDS
        )
    context.top_logprobs(f"sampling_params.{IDS}", count)
    context.manager.check_ids(IDS, [token_id for token_id in chain(*rows) if token_id != NONE])
    ids = np.full((len(rows), count), NONE, dtype=np.int32)
    for padded, row in zip(ids, rows, strict=True):
        padded[: len(row)] = row
    return PromptCandidates(start, count, ids.tobytes())


def with_candidates(params: GenerationParams, candidates: PromptCandidates) -> GenerationParams:
    """They come with the logprobs of the prompt itself."""
    k = 0 if params.sampling.prompt_logprobs is None else params.sampling.prompt_logprobs
    return params.replace(prompt_candidates=candidates, prompt_logprobs=k)


def candidate_scores(params: GenerationParams, packed: PromptLogprobs | None) -> str | None:
    """A .npy file of ``[rows, count]`` float32, in base64; -inf stands for ids that are none."""
    wanted = params.sampling.prompt_candidates
    if wanted is None or packed is None:
        return None
    scores = np.frombuffer(packed.candidates, np.float32).reshape(-1, wanted.count)[wanted.start :]
    file = io.BytesIO()
    np.save(file, scores, allow_pickle=False)
    return b64encode(file.getbuffer()).decode()
