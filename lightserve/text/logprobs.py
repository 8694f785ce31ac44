"""Log probabilities: those of a prompt are unpacked from the arrays of a message; -inf is replaced for JSON.

llm.py imports this module too: it needs neither torch nor a web framework.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import orjson

from lightserve.messages.output import StrOut
from lightserve.messages.step import PromptLogprobs

MIN_LOGPROB = -9999.0  # JSON has no -inf; vLLM writes this number


class PromptToken(NamedTuple):
    token_id: int
    logprob: float | None  # None: it is the first token, for which the model gives no probability
    rank: int  # 1: the most likely token
    top: list[tuple[int, float]]  # the most likely tokens and their logprobs, best first


def unpack_prompt_logprobs(prompt_ids: Sequence[int], packed: PromptLogprobs | None) -> list[PromptToken]:
    """One entry per token. Without a model (--null_worker) ``packed`` is None and every logprob is -inf."""
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


def finite_logprob(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)


def logprob_json(logprob: float | None) -> bytes:
    if logprob is None:
        return b"null"
    return orjson.dumps(logprob if logprob > MIN_LOGPROB else MIN_LOGPROB)  # max() takes 0.2 us longer


def mean_logprob(outs: Sequence[StrOut]) -> float:
    """Of the tokens of one sequence."""
    return sum(out.token.logprob or 0.0 for out in outs) / len(outs)
