"""A request as the scheduler sees it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from lightserve.io_struct import FinishReason, GenerationParams, NewReq, ReqFailed, TokenOut
from lightserve.router.radix_cache import Ids, RadixNode


@dataclass(slots=True, eq=False)
class Req:
    """Lengths run ahead of tokens: a step is planned before the tokens of the one before it are back."""

    req_id: int
    prompt_ids: list[int]
    params: GenerationParams
    max_new_tokens: int  # what the request asks for, cut to what the context holds
    eos_ids: tuple[int, ...]
    arrived_s: float = 0.0
    priority: int = 0  # lower goes first
    deadline_s: float | None = None  # when it ends with an error, wherever it is
    salt: str = ""  # prefixes are shared with requests of the same salt only

    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None  # why it could not go on: it is aborted, without a last token
    error_status: int = 400  # what HTTP says then
    ends_in_text: bool = False  # its last token is no end token
    stop_token: int | None = None  # the one of stop_token_ids that ended it
    seed: int = field(init=False)
    prompt: Ids = field(init=False)  # prompt_ids, to be compared

    slots: list[int] = field(default_factory=list)  # of the tokens whose KV is computed or planned
    node: RadixNode | None = None  # of the prefix cache, locked
    shared_len: int = 0  # the first of ``slots``, which belong to the cache
    planned_len: int = 0  # tokens whose KV is there or computed by the steps so far
    planned_outputs: int = 0  # tokens that the steps so far bring, as far as is known

    cached_len: int = 0  # tokens of the prompt whose KV was there on first admission
    times_passed: int = 0  # others were admitted before it although it came first
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    def __post_init__(self) -> None:
        self.prompt = np.array(self.prompt_ids, dtype=np.int32)
        seed = self.params.sampling.seed
        self.seed = random.getrandbits(63) if seed is None else seed

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def total_len(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def in_flight(self) -> int:
        """Tokens that steps under way will bring."""
        return self.planned_outputs - len(self.output_ids)

    @property
    def unplanned(self) -> int:
        """Tokens that are known, or will be after the steps so far, and whose KV no step computes yet."""
        if self.planned_outputs >= self.max_new_tokens:
            return 0  # its last token is sampled already; nobody needs that one's KV
        return len(self.prompt_ids) + self.planned_outputs - self.planned_len

    @property
    def needs_prompt_computed(self) -> bool:
        """Whether nothing that is cached may stand for its prompt, whose logprobs are yet to come."""
        return self.params.sampling.prompt_logprobs is not None and not self.output_ids

    @property
    def is_prefilling(self) -> bool:
        return self.unplanned > 1

    def plan(self, slots: list[int]) -> None:
        """The next step computes len(slots) more of its tokens."""
        self.slots += slots
        self.planned_len += len(slots)
        if self.planned_len == len(self.prompt_ids) + self.planned_outputs:
            self.planned_outputs += 1

    def begin(self) -> None:
        """On admission, with the slots of what is cached: the workers know nothing of it yet."""
        self.planned_len = len(self.slots)
        self.planned_outputs = len(self.output_ids)

    def lose_kv(self) -> None:
        """The workers are gone: what is left of it are its tokens."""
        self.slots, self.node, self.shared_len, self.planned_len = [], None, 0, 0
        self.planned_outputs = len(self.output_ids)

    def fail(self, failure: ReqFailed) -> None:
        self.error, self.error_status, self.finish_reason = failure.message, failure.status, FinishReason.ABORT

    def take(self, out: TokenOut) -> None:
        token_id = out.token.id
        self.output_ids.append(token_id)
        count = len(self.output_ids)
        # a step under way that was to sample after fewer tokens samples nothing: it computes one of the forced ones
        self.planned_outputs = max(self.planned_outputs, count)
        if count > self.params.stopping.min_new_tokens and self._is_end(token_id):
            self.finish_reason = FinishReason.STOP
        elif out.completes_grammar:
            self.finish_reason = FinishReason.STOP
            self.ends_in_text = token_id not in self.eos_ids
        elif count >= self.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH

    def _is_end(self, token_id: int) -> bool:
        if token_id in self.params.stopping.stop_token_ids:
            self.stop_token = token_id
            return True
        return token_id in self.eos_ids and not self.params.stopping.ignore_eos

    def as_new(self) -> NewReq:
        """What the workers are told of it when it enters, or enters again."""
        return NewReq(
            self.req_id,
            self.token_ids,
            self.params.sampling,
            self.seed,
            self.eos_ids,
            cached_slots=self.slots.copy(),
            output_len=len(self.output_ids),
            stopping=self.params.stopping,
        )
