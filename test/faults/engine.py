"""What the model of a server can take: cases are written for one with a large vocabulary that says a token in 20 ms."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from test.api.test_faults import COMPLETE, Client

FIRST_ID = 20  # those before it may be special, or spoilt by ``failing_worker``
LAST_IDS = (30_000, 120)  # the largest that is asked for; one that every model has
STEP_S = 0.02
LEAST_TIMES, MOST_TIMES = 0.2, 10.0  # as many tokens from a slow model, from a fast one
MEASURED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Engine:
    context_len: int
    last_id: int
    step_s: float = STEP_S

    def ids(self, wanted: Sequence[int]) -> list[int]:
        """These where the model has them, others in their place where not."""
        return [i if FIRST_ID <= i <= self.last_id else FIRST_ID + i % (self.last_id - FIRST_ID) for i in wanted]

    def prompt_len(self, wanted: int, tokens: int) -> int:
        return max(min(round(wanted * min(self._times, 1.0)), self.context_len - tokens - 1), 1)

    def tokens(self, wanted: int, prompt_len: int = 0) -> int:
        """As many as take so long, that faults come in the middle of them; no more than fit."""
        return min(round(wanted * self._times), self.context_len - prompt_len)

    @property
    def _times(self) -> float:
        return min(max(STEP_S / self.step_s, LEAST_TIMES), MOST_TIMES)


def null_engine(client: Client) -> Engine:
    """The null worker's steps take as long as a case's flags say."""
    return Engine(_context_len(client), LAST_IDS[0])


def measured_engine(client: Client) -> Engine:
    last_id = next(i for i in LAST_IDS if _seconds(client, i, tokens=1) is not None)
    least_s = min(_seconds(client, last_id, MEASURED_TOKENS) or STEP_S for _ in range(3))
    return Engine(_context_len(client), last_id, least_s / MEASURED_TOKENS)


def _context_len(client: Client) -> int:
    _, answer = client.send("GET", "/v1/models")
    return int(orjson.loads(answer)["data"][0]["max_model_len"])


def _seconds(client: Client, token_id: int, tokens: int) -> float | None:
    """That an answer takes; None if the model has no such token."""
    begin_s = time.monotonic()
    status, _ = client.post(COMPLETE, {"prompt": [token_id], "max_tokens": tokens, "ignore_eos": True})
    return time.monotonic() - begin_s if status == 200 else None
