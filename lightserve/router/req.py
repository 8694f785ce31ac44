"""A request as the scheduler sees it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightserve.messages.block_hash import NO_HASHES, Hashes
from lightserve.messages.cluster import KvTarget, KvTransferParams
from lightserve.messages.int_arrays import GrowingArray, Int32Array, int32s
from lightserve.messages.media import ImageItem
from lightserve.messages.params import BACKGROUND_PRIORITY, FinishReason, GenerationParams
from lightserve.messages.step import NewReq, TokenOut
from lightserve.router.chunk_boundaries import NO_BOUNDARIES, ChunkBoundaries
from lightserve.router.kv.radix_cache import RadixNode
from lightserve.router.observability.timeline import NO_TIMELINE, Timeline
from lightserve.router.req_columns import MAY_DRAFT_BY_GRAMMAR, MAY_DRAFT_IF_FEW, ReqColumns

MANY = 2**62
MIN_MATCH = 4  # tokens of an image that a cached prefix must have: 120 bits of its digest


def _column(name: str) -> Any:
    """A property that is kept in a column of ReqColumns, which documents it."""

    def get(req: Req) -> int:
        number: int = getattr(req.columns, name).item(req.row)
        return number

    def set_(req: Req, value: int) -> None:
        getattr(req.columns, name)[req.row] = value

    return property(get, set_)


class ReqProgress:
    """How far a request is planned, computed and known. Planned lengths are ahead of known tokens: a step is planned
    before the tokens of the last step are back.

    A step may compute drafts of the next tokens, and only its result says how many of them were accepted. So what is
    planned is a range: ``planned_len`` and ``planned_outputs`` are its lower end, and ``planned_drafts`` its width.
    KV slots belong to places in the text: those of rejected drafts are written again by the next step.
    """

    columns: ReqColumns
    row: int
    shared_len: int = _column("shared_len")
    planned_len: int = _column("planned_len")
    certain_len: int = _column("certain_len")
    planned_outputs: int = _column("planned_outputs")
    planned_drafts: int = _column("planned_drafts")
    output_len: int = _column("output_len")
    has_drafted: int = _column("has_drafted")
    num_accepted: int = _column("num_accepted")
    spare_slots: int = _column("spare_slots")

    @property
    def last_token_s(self) -> float:
        return self.columns.last_token_s.item(self.row)

    @last_token_s.setter
    def last_token_s(self, value: float) -> None:
        self.columns.last_token_s[self.row] = value

    @property
    def in_flight(self) -> int:
        """Steps in flight that will return output tokens."""
        return self.planned_outputs - self.output_len

    def roll_back(self) -> None:
        """Steps in flight failed: plan again from the tokens whose KV is certain."""
        self.planned_len = self.certain_len
        self.planned_outputs = self.output_len
        self.planned_drafts = 0

    def _accept(self) -> None:
        """Drafts were accepted: ``num_accepted``. A request that was preempted since has no slots."""
        if self.planned_len:
            self.columns.accept(np.array([self.row]))
        else:
            self.planned_outputs += self.num_accepted
            self.num_accepted = 0


@dataclass(eq=False)
class Req(ReqProgress):
    """A request in the router."""

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
    is_private: bool = False  # its KV never leaves the KV pool
    shares_prefix: bool = True  # if not, its whole prompt is computed, and no other request uses its KV
    lora_id: int | None = None  # its adapter
    is_internal: bool = False  # the router's own: no client waits for it
    parent: int | None = None  # an ended request whose tokens it begins with: see fork_points.py
    can_fork: bool = False  # later requests may name it so
    generation_prompt_len: int = 0  # see SchedulingParams
    boundaries: ChunkBoundaries = NO_BOUNDARIES  # of the chunks in which its prompt is computed
    images: tuple[ImageItem, ...] = ()  # in its prompt

    finish_reason: FinishReason | None = None
    is_text_token: bool = False  # its last token is text, not an end token
    stop_token: int | None = None  # which of stop_token_ids ended it
    seed: int = field(init=False)

    node: RadixNode | None = None  # node of the prefix cache that it has locked
    lora_slot: int = -1  # of its adapter on the device, while it runs
    _slots: GrowingArray = field(default_factory=GrowingArray)  # without those in the tail of its row
    _outputs: GrowingArray = field(default_factory=GrowingArray)  # the same

    num_admissions: int = 0
    cached_len: int = 0  # prompt tokens that were cached on first admission
    num_passed_over: int = 0  # how many later requests were admitted before it
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    timeline: Timeline = NO_TIMELINE
    block_hashes: Hashes = field(default_factory=lambda: NO_HASHES)  # of its first blocks, if a dispatcher wants them
    kv_keys: list[bytes] = field(default_factory=list)  # of its first blocks, if evicted KV is stored
    target: KvTarget | None = None  # another engine wants the KV of its prompt
    kv_transfer_params: KvTransferParams | None = None  # another engine would compute its prompt
    lora_digest: str = ""  # of the files of its adapter; empty: it has none, or it is not loaded yet
    branch_len: int = 0  # so many first tokens are cached or stored, but KV groups have lost what the next one needs
    loads_checked: int = -1  # ``num_admissions`` when the last load of its prefix was considered
    max_missing: int = MANY  # lower tiers are asked if fewer blocks are missing, so they are asked for less each time

    def __post_init__(self) -> None:
        self.prompt_ids = int32s(self.prompt_ids)
        sampling, stopping = self.params.sampling, self.params.stopping
        self.seed = random.getrandbits(63) if sampling.seed is None else sampling.seed
        self.columns, self.row = ReqColumns(1), 0
        self.columns.prompt_len[0] = len(self.prompt_ids)
        self.columns.max_new_tokens[0] = self.max_new_tokens
        self.columns.is_plain[0] = not (stopping.stop_token_ids or stopping.min_new_tokens)
        self.columns.may_draft[0] = _may_draft(self.params)
        self.columns.is_background[0] = self.is_background

    @property
    def is_background(self) -> bool:
        """Nobody waits for it."""
        return self.priority == BACKGROUND_PRIORITY

    @property
    def slots(self) -> Int32Array:
        """KV slots of the first tokens, computed or planned."""
        self.flush()
        return self._slots.view

    @property
    def outputs(self) -> Int32Array:
        """The output tokens that are known."""
        self.flush()
        return self._outputs.view

    @property
    def output_ids(self) -> list[int]:
        """A copy of ``outputs``."""
        ids: list[int] = self.outputs.tolist()
        return ids

    @property
    def token_ids(self) -> Int32Array:
        return np.concatenate((self.prompt_ids, self.outputs)) if self.output_len else self.prompt_ids

    @property
    def last_token_id(self) -> int:
        return self.outputs.item(-1) if self.output_len else self.prompt_ids.item(-1)

    def tokens_between(self, begin: int, end: int) -> Int32Array:
        """Of prompt and output. All of them are known."""
        prompt_len = len(self.prompt_ids)
        prompt = self.prompt_ids[begin:end]
        if end <= prompt_len:
            return prompt
        return np.concatenate((prompt, self.outputs[max(begin - prompt_len, 0) : end - prompt_len]))

    @property
    def total_len(self) -> int:
        return len(self.prompt_ids) + self.output_len

    @property
    def unplanned(self) -> int:
        """Tokens without planned KV, among those that are known after the steps planned so far."""
        planned_outputs = self.planned_outputs
        if planned_outputs + self.planned_drafts >= self.max_new_tokens:
            return 0  # a planned step samples the last token, whose KV is never needed
        return len(self.prompt_ids) + planned_outputs - self.planned_len

    @property
    def needs_prompt_computed(self) -> bool:
        """Whether its whole prompt must be computed: the client wants its logprobs, or all its tokens are pooled."""
        if not self.shares_prefix:
            return True
        return self.params.sampling.prompt_logprobs is not None and not self.output_len

    def usable_len(self, cached_len: int) -> int:
        """How many of so many cached tokens it may use. So few tokens of an image may be those of another one."""
        for image in self.images:
            if 0 < image.tokens_before(cached_len) < MIN_MATCH:
                return image.start
        return cached_len

    @property
    def uses_tiers(self) -> bool:
        """Whether its KV may be stored below the KV pool, and loaded from there."""
        return self.keeps_kv_cached and not self.is_private

    def is_expired(self, now_s: float) -> bool:
        """Whether its deadline has passed."""
        return self.deadline_s is not None and self.deadline_s <= now_s

    @property
    def is_prefilling(self) -> bool:
        return self.unplanned > 1

    def move_to(self, columns: ReqColumns, row: int) -> None:
        """Have its numbers in another row."""
        self.flush()
        columns.copy_row(row, self.columns, self.row)
        self.columns, self.row = columns, row

    def flush(self) -> None:
        """Append the values in the tails of its row to its own arrays."""
        columns = self.columns
        for array, tails in ((self._slots, columns.slots), (self._outputs, columns.outputs)):
            values = tails.take(self.row)
            if len(values):
                array.extend(values)

    def plan(self, slots: Int32Array) -> None:
        """The next step computes KV of len(slots) more tokens."""
        self.flush()
        self._slots.extend(slots)
        self.planned_len += len(slots)
        if self.planned_len == len(self.prompt_ids) + self.planned_outputs:
            self.planned_outputs += 1

    def begin(self) -> None:
        """Called on admission, when it has the slots of the cached tokens."""
        self.planned_len = len(self.slots)
        self.certain_len = 0  # a step in flight may compute the cached tokens
        self.planned_outputs = self.output_len
        self.has_drafted = self.num_accepted = 0
        self.num_admissions += 1
        self.max_missing = MANY

    def reset_kv(self) -> None:
        """The workers died. Only the tokens are left."""
        self.clear_slots()
        self.kv_transfer_params = None
        self.planned_outputs = self.output_len

    def attach(self, node: RadixNode, slots: Int32Array) -> None:
        """It has the slots of its cached prefix from now on, which ends at ``node``."""
        self.node, self._slots = node, GrowingArray(slots)
        self.shared_len = len(slots)

    def take_spare_slots(self) -> Int32Array:
        """It has slots for its planned tokens only, from now on. Returns the others."""
        slots = self.slots
        self._slots, self.spare_slots = GrowingArray(slots[: self.planned_len]), 0
        return slots[self.planned_len :]

    def clear_slots(self) -> None:
        """It holds no KV."""
        self.flush()
        self._slots, self.node = GrowingArray(), None
        self.shared_len = self.planned_len = self.certain_len = 0
        self.planned_drafts = self.spare_slots = 0

    def continue_from(self, output_ids: list[int], now_s: float) -> None:
        """It has these output tokens from another engine. Latencies count from now on.

        They may end it here, with another context length or other end tokens than there: ``finish_reason`` tells.
        """
        self._outputs = GrowingArray(output_ids)
        self.output_len = self.planned_outputs = len(output_ids)
        self.admitted_s = self.first_token_s = self.last_token_s = now_s
        self.finish_reason = self._reason_after(output_ids[-1], len(output_ids))

    def fail(self) -> None:
        self.finish_reason = FinishReason.ABORT

    def add_tokens(self, outs: Sequence[TokenOut]) -> Sequence[TokenOut]:
        """Append the tokens of a step up to the one that ends it, and return them. Later ones are dropped."""
        if self.num_accepted:
            self._accept()
        for count, out in enumerate(outs, start=1):
            self._add_token(out)
            if self.finish_reason is not None:
                return outs[:count]
        return outs

    @property
    def cacheable_len(self) -> int:
        """Its tokens whose KV other requests may use from now on.

        With drafts, those that steps in flight compute are not among them: if the steps fail, nobody knows the slots
        to which they wrote.
        """
        planned_len = self.planned_len - self.in_flight if self.has_drafted else self.planned_len
        return min(planned_len, self.total_len)

    def _add_token(self, out: TokenOut) -> None:
        token_id = out.token.id
        self.flush()
        self._outputs.extend((token_id,))
        count = len(self._outputs)
        self.output_len = count
        # a step in flight that was planned with fewer tokens samples nothing: it computes one of the forced tokens
        self.planned_outputs = max(self.planned_outputs, count)
        self.finish_reason = self._reason_after(token_id, count)
        if out.completes_grammar and self.finish_reason is not FinishReason.STOP:
            self.finish_reason = FinishReason.STOP
            self.is_text_token = token_id not in self.eos_ids

    def _reason_after(self, token_id: int, count: int) -> FinishReason | None:
        """Why it ends with this token, the last of ``count``; None: it does not."""
        if count > self.params.stopping.min_new_tokens and self._is_end(token_id):
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= self.max_new_tokens else None

    def _is_end(self, token_id: int) -> bool:
        if token_id in self.params.stopping.stop_token_ids:
            self.stop_token = token_id
            return True
        return token_id in self.eos_ids and not self.params.stopping.ignore_eos

    def as_new(self, group_slots: tuple[Int32Array, ...] = ()) -> NewReq:
        """The message by which it enters the workers, for the first time or after a preemption."""
        return NewReq(
            self.req_id,
            self.token_ids,
            self.params.sampling,
            self.seed,
            self.eos_ids,
            cached_slots=self.slots,
            output_len=self.output_len,
            stopping=self.params.stopping,
            group_slots=group_slots,
            lora_slot=self.lora_slot,
        )


def _may_draft(params: GenerationParams) -> int:
    """See ReqColumns.may_draft."""
    sampling = params.sampling
    if not sampling.speculative:
        return 0
    if sampling.grammar is not None:
        return MAY_DRAFT_BY_GRAMMAR
    return MAY_DRAFT_IF_FEW if sampling.depends_on_output or params.stopping.min_new_tokens else 1
