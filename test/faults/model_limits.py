"""Adapts cases to a model. They are written for a large vocabulary and 20 ms per token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from test.api.test_faults import COMPLETE, Client

FIRST_ID = 20  # lower ids may be special tokens, or the NaN token of ``failing_worker``
LAST_IDS = (30_000, 120)  # the largest that cases use; one that every model has
STEP_S = 0.02
MIN_SCALE, MAX_SCALE = 0.2, 10.0  # bounds of the factor for the number of tokens, for a slow and a fast model
MEASURED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class ModelLimits:
    context_len: int
    last_id: int
    step_s: float = STEP_S

    def ids(self, wanted: Sequence[int]) -> list[int]:
        """``wanted``, with ids that the model lacks replaced by others."""
        return [i if FIRST_ID <= i <= self.last_id else FIRST_ID + i % (self.last_id - FIRST_ID) for i in wanted]

    def prompt_len(self, wanted: int, tokens: int) -> int:
        return max(min(round(wanted * min(self._scale, 1.0)), self.context_len - tokens - 1), 1)

    def tokens(self, wanted: int, prompt_len: int = 0) -> int:
        """A number of tokens that takes long enough for a fault to occur in the middle, and fits into the context."""
        return min(round(wanted * self._scale), self.context_len - prompt_len)

    @property
    def _scale(self) -> float:
        return min(max(STEP_S / self.step_s, MIN_SCALE), MAX_SCALE)


def null_worker_limits(client: Client) -> ModelLimits:
    """The flags of a case set the step time of the null worker."""
    return ModelLimits(_context_len(client), LAST_IDS[0])


def measured_limits(client: Client) -> ModelLimits:
    last_id = next(i for i in LAST_IDS if _seconds(client, i, tokens=1) is not None)
    least_s = min(_seconds(client, last_id, MEASURED_TOKENS) or STEP_S for _ in range(3))
    return ModelLimits(_context_len(client), last_id, least_s / MEASURED_TOKENS)


def _context_len(client: Client) -> int:
    _, response = client.send("GET", "/v1/models")
    return int(orjson.loads(response)["data"][0]["max_model_len"])


def _seconds(client: Client, token_id: int, tokens: int) -> float | None:
    """Seconds for one response; None if the model has no such token."""
    begin_s = time.monotonic()
    status, _ = client.post(COMPLETE, {"prompt": [token_id], "max_tokens": tokens, "ignore_eos": True})
    return time.monotonic() - begin_s if status == 200 else None
