"""Continuous batching for the offline LLM: first come, first served, no request paused, no torch.

A request is admitted when the pool can hold its prompt and all the output it may ask for, so nothing ever runs out.
Each step carries one token of every running request and prompt chunks up to a budget.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from lightserve.common.token_slots import Slots, TokenSlots
from lightserve.io_struct import FinishReason, NewReq, SamplingParams, Step, StepRow, TokenOut


@dataclass(slots=True, eq=False)
class Req:
    req_id: int
    prompt_ids: list[int]
    sampling: SamplingParams
    max_new_tokens: int  # what sampling asks for, cut to what the context holds
    eos_ids: tuple[int, ...]
    output_ids: list[int] = field(default_factory=list)
    slots: list[Slots] = field(default_factory=list)
    computed_len: int = 0
    finish_reason: FinishReason | None = None

    @property
    def total_len(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def peak_len(self) -> int:
        return len(self.prompt_ids) + self.max_new_tokens

    def append(self, token_id: int) -> None:
        self.output_ids.append(token_id)
        ends = (
            self.sampling.stop_token_ids if self.sampling.ignore_eos else (*self.eos_ids, *self.sampling.stop_token_ids)
        )
        if token_id in ends and len(self.output_ids) > self.sampling.min_new_tokens:
            self.finish_reason = FinishReason.STOP
        elif len(self.output_ids) >= self.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH


class ContinuousBatching:
    def __init__(self, num_slots: int, max_running: int, batch_max_tokens: int) -> None:
        self.slots = TokenSlots(num_slots)
        self._max_running = max_running
        self._batch_max_tokens = batch_max_tokens
        self._promised = 0  # slots that running requests hold or may still ask for
        self._waiting: deque[Req] = deque()
        self._running: dict[int, Req] = {}
        self._left: list[int] = []  # requests the workers must forget

    def add(self, req: Req) -> None:
        self._waiting.append(req)

    def next_step(self) -> Step | None:
        """What to compute next; None when nothing waits or runs and the workers are clean."""
        new = [_new_req(req) for req in self._admit()]
        rows = self._rows()
        left, self._left = self._left, []
        return Step(rows, new, left) if rows or left else None

    def take(self, outs: Iterable[TokenOut]) -> list[Req]:
        """Give each request its token; the requests that got one, finished or not."""
        reqs = []
        for out in outs:
            req = self._running[out.req_id]
            req.append(out.token_id)
            reqs.append(req)
        return reqs

    def release(self, req: Req) -> None:
        """A request that is done gives everything back."""
        del self._running[req.req_id]
        if req.slots:
            self.slots.free(np.concatenate(req.slots))
        self._promised -= req.peak_len
        self._left.append(req.req_id)

    def abort(self, req: Req) -> None:
        """Drop a request that waits or runs; the next step makes the workers forget it."""
        if req.req_id in self._running:
            self.release(req)
        elif req in self._waiting:
            self._waiting.remove(req)

    def abort_all(self) -> None:
        self._waiting.clear()
        for req in list(self._running.values()):
            self.release(req)

    def _admit(self) -> list[Req]:
        admitted = []
        while self._waiting and len(self._running) < self._max_running:
            if self._promised + self._waiting[0].peak_len > self.slots.size:
                break
            req = self._waiting.popleft()
            self._promised += req.peak_len
            self._running[req.req_id] = req
            admitted.append(req)
        return admitted

    def _rows(self) -> list[StepRow]:
        rows = []
        prompt_budget = self._batch_max_tokens
        for req in self._running.values():
            count = req.total_len - req.computed_len
            if count > 1:
                count = min(count, prompt_budget)
                prompt_budget -= count
            if count:
                slots = self.slots.alloc(count)
                req.slots.append(slots)
                req.computed_len += count
                rows.append(StepRow(req.req_id, slots.tolist()))
        return rows


def _new_req(req: Req) -> NewReq:
    """What the workers are told of a request; a seed it lacks is drawn here, for all ranks the same."""
    seed = random.getrandbits(63) if req.sampling.seed is None else req.sampling.seed
    return NewReq(req.req_id, req.prompt_ids, req.sampling, seed, req.eos_ids)
