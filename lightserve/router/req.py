"""A request as the scheduler sees it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from lightserve.io_struct import FinishReason, NewReq, SamplingParams, TokenOut


@dataclass(slots=True, eq=False)
class Req:
    """Lengths run ahead of tokens: a step is planned before the tokens of the one before it are back."""

    req_id: int
    prompt_ids: list[int]
    sampling: SamplingParams
    max_new_tokens: int  # what sampling asks for, cut to what the context holds
    eos_ids: tuple[int, ...]
    arrived_s: float = 0.0
    output_ids: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)  # of the tokens whose KV is computed or planned
    planned_len: int = 0  # tokens whose KV the steps so far compute
    planned_outputs: int = 0  # tokens that the steps so far sample
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the one of sampling.stop_token_ids that ended it
    cached_len: int = 0  # tokens of the prompt whose KV was there on admission
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    @property
    def peak_len(self) -> int:
        return len(self.prompt_ids) + self.max_new_tokens

    @property
    def unplanned(self) -> int:
        """Tokens that are known, or will be after the steps so far, and whose KV no step computes yet."""
        if self.planned_outputs >= self.max_new_tokens:
            return 0  # its last token is sampled already; nobody needs that one's KV
        return len(self.prompt_ids) + self.planned_outputs - self.planned_len

    def plan(self, slots: list[int]) -> None:
        """The next step computes len(slots) more of its tokens."""
        self.slots += slots
        self.planned_len += len(slots)
        if self.planned_len == len(self.prompt_ids) + self.planned_outputs:
            self.planned_outputs += 1

    def take(self, out: TokenOut) -> None:
        token_id = out.token_id
        self.output_ids.append(token_id)
        count = len(self.output_ids)
        if count > self.sampling.min_new_tokens and self._is_end(token_id):
            self.finish_reason = FinishReason.STOP
        elif count >= self.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH

    def _is_end(self, token_id: int) -> bool:
        if token_id in self.sampling.stop_token_ids:
            self.stop_token = token_id
            return True
        return token_id in self.eos_ids and not self.sampling.ignore_eos

    def as_new(self) -> NewReq:
        """What the workers are told of it; a seed it lacks is drawn here, for all ranks the same."""
        seed = random.getrandbits(63) if self.sampling.seed is None else self.sampling.seed
        return NewReq(self.req_id, self.prompt_ids, self.sampling, seed, self.eos_ids)
