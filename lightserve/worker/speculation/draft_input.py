"""What a step with drafts has beside its input: which of its tokens are drafts, and which get logits.

A request of such a step computes its next token and drafts of those after it, or a chunk of its prompt. The host may
not know the length of a request whose drafts are in flight. So the device finds positions and slots: see
ops.locate_tokens. Steps without drafts have nothing of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightserve.common.device import to_device
from lightserve.common.ops.step import COUNTED, NO_SLOT
from lightserve.messages.int_arrays import Int32Array, Int64Array
from lightserve.messages.step import Step
from lightserve.worker.batch.req_columns import ReqColumns

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

    token_reqs: Tensor  # [tokens]: the request of each token, as its place in the step
    q_len: Tensor  # [requests] tokens
    slot_len: Tensor  # [requests] tokens that have slots before the step
    draft_counts: Tensor  # [requests]
    first_rows: Tensor  # [requests]: of the logits
    logit_tokens: Tensor  # [rows]: the token of each row of logits
    logit_reqs: Tensor  # [rows]: its request
    draft_rows: Tensor  # [drafts]: the rows of logits after drafts


@dataclass(frozen=True, slots=True)
class DraftInput:
    """A step with drafts, on the host. One number for each request."""

    drafts: Int64Array
    q_len: Int64Array
    slot_len: Int64Array  # tokens that have slots before the step

    @classmethod
    def planned(cls, counts: DraftCounts, rows: Int64Array, q_len: Int64Array, columns: ReqColumns) -> DraftInput:
        """The drafts are in flight from now on, and the requests have the new slots."""
        slot_len = columns.cache_len[rows] + columns.spare_slots[rows]
        columns.spare_slots[rows] += counts.slots - (q_len - counts.drafts)
        columns.drafts_in_flight[rows] += counts.drafts
        return cls(counts.drafts, q_len, slot_len)

    @property
    def first_rows(self) -> Int64Array:
        """A request has a row of logits after its last token that is no draft, and after each draft."""
        first_rows: Int64Array = np.cumsum(self.drafts + 1) - (self.drafts + 1)
        return first_rows

    @property
    def logit_reqs(self) -> Int64Array:
        return np.repeat(np.arange(len(self.drafts)), self.drafts + 1)

    @property
    def max_drafts(self) -> int:
        return int(self.drafts.max())

    def to(self, device: torch.device) -> DraftTensors:
        """All arrays in one copy."""
        first_rows, logit_reqs = self.first_rows, self.logit_reqs
        first_tokens = np.cumsum(self.q_len) - 1 - self.drafts  # of those with logits
        rows = np.arange(len(logit_reqs))
        arrays: tuple[Int64Array, ...] = (
            np.repeat(np.arange(len(self.q_len)), self.q_len),
            self.q_len,
            self.slot_len,
            self.drafts,
            first_rows,
            rows + (first_tokens - first_rows)[logit_reqs],
            logit_reqs,
            np.delete(rows, first_rows),
        )
        padded = [np.pad(array.astype(np.int32), (0, -len(array) % ALIGNED)) for array in arrays]
        tensors = to_device(np.concatenate(padded), device).split_with_sizes([len(array) for array in padded])
        return DraftTensors(*(tensor[: len(array)] for tensor, array in zip(tensors, arrays, strict=True)))
