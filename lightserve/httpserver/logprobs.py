"""The logprobs of a prompt, token by token, out of the arrays in which they travel. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightserve.io_struct import PromptLogprobs


class PromptToken(NamedTuple):
    token_id: int
    logprob: float | None  # None: it is the first, of which the model says nothing
    rank: int  # 1: the likeliest
    top: list[tuple[int, float]]  # the likeliest tokens and their logprobs, best first


def unpack(prompt_ids: Sequence[int], packed: PromptLogprobs | None) -> list[PromptToken]:
    """One of each token. ``packed`` is None where there is no model that could tell: no token is likely then."""
    first, *rest = prompt_ids
    tokens = [PromptToken(first, None, 0, [])]
    if packed is None:
        return tokens + [PromptToken(token_id, -math.inf, 0, []) for token_id in rest]
    logprobs, top_logprobs = (np.frombuffer(data, np.float32) for data in (packed.logprobs, packed.top_logprobs))
    ranks, top_ids = (np.frombuffer(data, np.int32) for data in (packed.ranks, packed.top_ids))
    k = len(top_ids) // max(len(rest), 1)
    shape = (len(rest), k)
    columns = logprobs.tolist(), ranks.tolist(), top_ids.reshape(shape).tolist(), top_logprobs.reshape(shape).tolist()
    for token_id, logprob, rank, ids, values in zip(rest, *columns, strict=True):
        tokens.append(PromptToken(token_id, logprob, rank, list(zip(ids, values, strict=True))))
    return tokens
