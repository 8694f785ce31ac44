"""What a step with drafts has beside its input: which of its tokens are drafts, and which get logits.

A request of such a step computes its next token and drafts of those after it, or a chunk of its prompt. The host may
not know the length of a request whose drafts are in flight. So the device finds positions and slots: see
ops.locate_tokens. Steps without drafts have nothing of this.

A step is padded to a captured shape (``StepShape.num_drafts``), if there is one. It then has as many rows of logits as
its requests may need. Those that no request needs repeat the first one, so what they write is written anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lightserve.common.ops.step import COUNTED, NO_REQ, NO_SLOT
from lightserve.messages.int_arrays import Int32Array, Int64Array
from lightserve.messages.step import Step
from lightserve.worker.batch.req_columns import ReqColumns
from lightserve.worker.batch.step_input import StepShape

UNKNOWN = -1  # in place of the token after those of a step: the step samples it
ALIGNED = 4  # numbers of 4 bytes: Triton compiles a kernel again for an array that begins elsewhere


class DraftCounts(NamedTuple):
    """One number for each request of a step."""

    drafts: Int64Array  # of its tokens, the last ones
    slots: Int64Array  # that it gets: those of its places in the text after all that have slots


def draft_counts(step: Step, rows: Int64Array, columns: ReqColumns) -> DraftCounts | None:
    """None: the step has no drafts, and the host knows where its tokens are. ``rows``: of its requests."""
    num_decodes = len(step.draft_counts)
    if not num_decodes or not (np.any(step.draft_counts) or columns.spare_slots[rows[:num_decodes]].any()):
        return None
    drafts = np.zeros(len(rows), dtype=np.int64)
    drafts[:num_decodes] = step.draft_counts
    chunks = [len(chunk.slots) for chunk in step.chunks]
    return DraftCounts(drafts, np.concatenate((step.slot_counts, chunks)).astype(np.int64))


def spread(slots: Int32Array, counts: Int64Array, q_len: Int64Array) -> Int32Array:
    """New slots as a column of all tokens: ``counts`` of each request at its first tokens, NO_SLOT at the others."""
    spread_slots = np.full(int(q_len.sum()), NO_SLOT, dtype=np.int32)
    start, first = np.cumsum(q_len) - q_len, np.cumsum(counts) - counts
    spread_slots[np.arange(len(slots)) + np.repeat(start - first, counts)] = slots
    return spread_slots


def ready_len(rows: Int64Array, columns: ReqColumns) -> Int64Array:
    """Tokens of requests that are computed. Only the device knows it while drafts are in flight."""
    return np.where(columns.drafts_in_flight[rows] > 0, COUNTED, columns.cache_len[rows])


class DraftTensors(NamedTuple):
    """On the device, int32 each."""

    token_reqs: Tensor  # [tokens]: the request of each token, as its place in the step, or NO_REQ
    q_len: Tensor  # [requests] tokens
    slot_len: Tensor  # [requests] tokens that have slots before the step
    draft_counts: Tensor  # [requests]
    first_rows: Tensor  # [requests]: of the logits
    logit_tokens: Tensor  # [rows]: the token of each row of logits
    logit_reqs: Tensor  # [rows]: its request
    known_after: Tensor  # [requests]: the token after those of the step, if it is part of a prompt; otherwise UNKNOWN

    @classmethod
    def of(cls, inputs: Tensor, shape: StepShape, rows: int) -> DraftTensors:
        """``inputs``: those of DraftInput.packed. ``rows``: of logits."""
        sizes = _sizes(shape, rows)
        padded = inputs.split_with_sizes([_aligned(size) for size in sizes])
        return cls(*(array[:size] for array, size in zip(padded, sizes, strict=True)))


class VerifiedCounts(NamedTuple):
    """Of each row of logits, int64 on the device."""

    tokens: Tensor  # that the request of the row gets
    proposed: Tensor  # drafts that the proposer had for it


class DraftRows(NamedTuple):
    """The rows of logits of a step with drafts: one for each token that may be sampled."""

    sampled_at: tuple[Tensor, Tensor, Tensor]  # temperature, seed and position of each
    input_ids: Tensor  # [rows] int64: the token before each
    drafts_after: Tensor  # [rows] int64: the draft after each, or NO_DRAFT
    tensors: DraftTensors
    max_drafts: int
    verified: VerifiedCounts | None = None  # as far as temperature and masks alone sample

    @property
    def b_position(self) -> Tensor:
        """``[rows]`` int32: of the tokens that are sampled."""
        return self.sampled_at[2]


def captured_rows(shape: StepShape) -> int:
    """Rows of logits of a captured step."""
    return min(shape.tokens, shape.requests * (1 + shape.num_drafts))


def draft_padding(shape: StepShape, first_token: int = 0) -> np.ndarray:
    """The part of DraftInput in a captured step that computes only padding. ``first_token``: with logits."""
    rows = captured_rows(shape)
    no_req, no_row = np.full(shape.tokens, NO_REQ), np.full(shape.requests, rows - 1)
    none = np.zeros(shape.requests, dtype=np.int64)
    first = np.full(rows, first_token)
    return _joined((no_req, none, none, none, no_row, first, 0 * first, none + UNKNOWN))


@dataclass(frozen=True, slots=True)
class DraftInput:
    """A step with drafts, on the host. One number for each request."""

    drafts: Int64Array
    q_len: Int64Array
    slot_len: Int64Array  # tokens that have slots before the step
    ready_len: Int64Array  # tokens that are computed before the step, or COUNTED

    @classmethod
    def planned(cls, counts: DraftCounts, rows: Int64Array, q_len: Int64Array, columns: ReqColumns) -> DraftInput:
        """The drafts are in flight from now on, and the requests have the new slots."""
        slot_len, computed = columns.cache_len[rows] + columns.spare_slots[rows], ready_len(rows, columns)
        columns.spare_slots[rows] += counts.slots - (q_len - counts.drafts)
        columns.drafts_in_flight[rows] += counts.drafts
        return cls(counts.drafts, q_len, slot_len, computed)

    @property
    def first_rows(self) -> Int64Array:
        """A request has a row of logits after its last token that is no draft, and after each draft."""
        first_rows: Int64Array = np.cumsum(self.drafts + 1) - (self.drafts + 1)
        return first_rows

    @property
    def logit_reqs(self) -> Int64Array:
        return np.repeat(np.arange(len(self.drafts)), self.drafts + 1)

    @property
    def num_rows(self) -> int:
        """Of logits."""
        return len(self.drafts) + int(self.drafts.sum())

    @property
    def max_drafts(self) -> int:
        return int(self.drafts.max())

    @property
    def num_drafting(self) -> int:
        """The first requests, among which are all that have drafts."""
        return int(np.flatnonzero(np.append(1, self.drafts))[-1])

    @property
    def draft_tokens(self) -> Int64Array:
        """The places of the drafts among the tokens of the step."""
        first = np.cumsum(self.q_len) - np.cumsum(self.drafts)
        return np.arange(self.drafts.sum()) + np.repeat(first, self.drafts)

    def packed(self, shape: StepShape, known_after: Int64Array | None = None) -> np.ndarray:
        """As one array of int32, padded if the shape is that of a captured step: see DraftTensors."""
        first_rows, logit_reqs = self.first_rows, self.logit_reqs
        first_tokens = np.cumsum(self.q_len) - 1 - self.drafts  # of those with logits
        rows = np.arange(len(logit_reqs))
        arrays = (
            np.repeat(np.arange(len(self.q_len)), self.q_len),
            self.q_len,
            self.slot_len,
            self.drafts,
            first_rows,
            rows + (first_tokens - first_rows)[logit_reqs],
            logit_reqs,
            np.full(len(self.q_len), UNKNOWN) if known_after is None else known_after,
        )
        if not shape.num_drafts:
            return _joined(arrays)
        inputs = draft_padding(shape, int(first_tokens[0]))
        begin = 0
        for array, size in zip(arrays, _sizes(shape, captured_rows(shape)), strict=True):
            inputs[begin : begin + len(array)] = array
            begin += _aligned(size)
        return inputs


def packed_size(shape: StepShape) -> int:
    """Integers that DraftInput has in the input of a captured step."""
    return sum(map(_aligned, _sizes(shape, captured_rows(shape))))


def _sizes(shape: StepShape, rows: int) -> tuple[int, ...]:
    """Of the arrays of DraftTensors."""
    return (shape.tokens, *[shape.requests] * 4, rows, rows, shape.requests)


def _joined(arrays: tuple[Int64Array, ...]) -> np.ndarray:
    return np.concatenate([np.pad(array.astype(np.int32), (0, -len(array) % ALIGNED)) for array in arrays])


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED
