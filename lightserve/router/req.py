"""A request as the scheduler sees it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from lightserve.io_struct import FinishReason, GenerationParams, NewReq, TokenOut
from lightserve.router.radix_cache import RadixNode
from lightserve.router.timeline import Timeline
from lightserve.utils.int_arrays import GrowingArray, Int32Array, int32s


@dataclass(slots=True, eq=False)
class Req:
    """A request in the router.

    Planned lengths are ahead of known tokens: a step is planned before the tokens of the last step are back.
    """

    req_id: int
    prompt_ids: Int32Array
    params: GenerationParams
    max_new_tokens: int  # what the client wants, limited by the context length
    eos_ids: tuple[int, ...]
    arrived_s: float = 0.0
    priority: int = 0  # lower goes first
    deadline_s: float | None = None  # the request fails at this time, whether it waits or runs
    salt: str = ""  # only requests of the same salt share cached prefixes
    keeps_kv_cached: bool = True  # if not, its KV is freed when it leaves the workers

    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    ends_in_text: bool = False  # its last token is text, not an end token
    stop_token: int | None = None  # which of stop_token_ids ended it
    seed: int = field(init=False)

    kv_slots: GrowingArray = field(default_factory=GrowingArray)  # of the first tokens, computed or planned
    node: RadixNode | None = None  # node of the prefix cache that it has locked
    shared_len: int = 0  # how many of ``kv_slots``, at the start, belong to the cache
    windowed: GrowingArray = field(default_factory=GrowingArray)  # like ``kv_slots``, in the windowed pool
    windowed_begin: int = 0  # it holds the slots in ``windowed`` from here on
    planned_len: int = 0  # tokens whose KV is cached, computed, or computed by a planned step
    certain_len: int = 0  # of these, the tokens whose step has completed; roll_back keeps only them
    planned_outputs: int = 0  # output tokens that exist after the planned steps, not counting forced ones

    num_admissions: int = 0
    cached_len: int = 0  # prompt tokens that were cached on first admission
    num_passed_over: int = 0  # how many later requests were admitted before it
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    timeline: Timeline | None = None  # None: it is not recorded

    def __post_init__(self) -> None:
        self.prompt_ids = int32s(self.prompt_ids)
        seed = self.params.sampling.seed
        self.seed = random.getrandbits(63) if seed is None else seed

    @property
    def token_ids(self) -> Int32Array:
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate((self.prompt_ids, int32s(self.output_ids)))

    @property
    def slots(self) -> Int32Array:
        """KV slots of the first tokens, computed or planned."""
        return self.kv_slots.view

    @property
    def windowed_slots(self) -> Int32Array:
        """The same in the windowed pool, if there is one. It holds those from ``windowed_begin`` on."""
        return self.windowed.view

    @property
    def total_len(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def in_flight(self) -> int:
        """Output tokens that steps in flight will return."""
        return self.planned_outputs - len(self.output_ids)

    @property
    def unplanned(self) -> int:
        """Tokens without planned KV, among those that are known after the steps planned so far."""
        if self.planned_outputs >= self.max_new_tokens:
            return 0  # a planned step samples the last token, whose KV is never needed
        return len(self.prompt_ids) + self.planned_outputs - self.planned_len

    @property
    def needs_prompt_computed(self) -> bool:
        """Whether its whole prompt must be computed, because the client wants the prompt's logprobs."""
        return self.params.sampling.prompt_logprobs is not None and not self.output_ids

    @property
    def is_prefilling(self) -> bool:
        return self.unplanned > 1

    def plan(self, slots: Int32Array) -> None:
        """The next step computes KV of len(slots) more tokens."""
        self.kv_slots.extend(slots)
        self.planned_len += len(slots)
        if self.planned_len == len(self.prompt_ids) + self.planned_outputs:
            self.planned_outputs += 1

    def begin(self) -> None:
        """Called on admission, when ``kv_slots`` holds the slots of the cached tokens."""
        self.planned_len = len(self.kv_slots)
        self.certain_len = 0  # a step in flight may compute the cached tokens
        self.planned_outputs = len(self.output_ids)
        self.num_admissions += 1

    def roll_back(self) -> None:
        """Steps in flight failed: plan again from the tokens whose KV is certain."""
        self.planned_len = self.certain_len
        self.planned_outputs = len(self.output_ids)

    def reset_kv(self) -> None:
        """The workers died. Only the tokens are left."""
        self.clear_slots()
        self.planned_outputs = len(self.output_ids)

    def clear_slots(self) -> None:
        """It holds no KV."""
        self.kv_slots, self.windowed, self.windowed_begin = GrowingArray(), GrowingArray(), 0
        self.node, self.shared_len, self.planned_len, self.certain_len = None, 0, 0, 0

    def fail(self) -> None:
        self.finish_reason = FinishReason.ABORT

    def add_token(self, out: TokenOut) -> None:
        token_id = out.token.id
        self.output_ids.append(token_id)
        count = len(self.output_ids)
        # a step in flight that was planned with fewer tokens samples nothing: it computes one of the forced tokens
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
        """The message by which it enters the workers, for the first time or after a preemption."""
        return NewReq(
            self.req_id,
            self.token_ids,
            self.params.sampling,
            self.seed,
            self.eos_ids,
            cached_slots=self.slots,
            output_len=len(self.output_ids),
            stopping=self.params.stopping,
            cached_windowed_slots=self.windowed_slots[self.windowed_begin :],
        )
