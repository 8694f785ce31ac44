"""The requests of a step that compute their next token, and how many drafts of the tokens after it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightserve.messages.int_arrays import NO_INT32, Int32Array, Int64Array
from lightserve.router.req_columns import MAY_DRAFT_BY_GRAMMAR, MAY_DRAFT_IF_FEW, ReqColumns
from lightserve.router.scheduler.draft_policy import draft_cost, drafts_worth, most_drafts
from lightserve.router.scheduler.limits import SchedulerLimits

FEW_DECODES = 4  # of a step that may wait for the tokens of the step before it


class Decodes(NamedTuple):
    rows: Int64Array  # of RunningBatch
    draft_counts: Int32Array = NO_INT32  # of each request; empty: none
    slot_counts: Int32Array = NO_INT32  # KV slots that each request gets; empty: one

    @property
    def num_tokens(self) -> int:
        return len(self.rows) + int(self.draft_counts.sum())

    @property
    def num_slots(self) -> int:
        return int(self.slot_counts.sum()) if len(self.slot_counts) else len(self.rows)


def plan_drafts(rows: Int64Array, columns: ReqColumns, limits: SchedulerLimits, available: int) -> Decodes:
    """Decodes of these requests with drafts, if the workers make any. ``available``: slots of the KV pool.

    A request has the slots of drafts that were rejected, and gets only those that are missing. If memory is short,
    there are no drafts, and requests use up the slots that they have.
    """
    if not limits.num_drafts or not len(rows):
        return Decodes(rows)
    draft_counts = _allowed_drafts(rows, columns, limits, if_refused=False)
    if draft_counts.any():
        if limits.has_draft_head or limits.num_stages > 1:
            draft_counts = np.minimum(draft_counts, columns.ready_drafts[rows])
        cost = draft_cost(len(rows), limits.weight_read_tokens)
        has_only_proposed = limits.leaves_out_drafts or limits.num_stages > 1
        draft_counts = drafts_worth(columns, rows, draft_counts, cost, has_only_proposed)
    slot_counts = columns.missing_slots(rows, draft_counts)
    if slot_counts.sum() > available:
        draft_counts = np.zeros_like(draft_counts)
        slot_counts = columns.missing_slots(rows, draft_counts)
    return Decodes(rows, draft_counts.astype(np.int32), slot_counts.astype(np.int32))


def next_drafts(rows: Int64Array, columns: ReqColumns, limits: SchedulerLimits) -> int:
    """How many drafts of a request the step may have, at most, that follows the one just planned, which has ``rows``.

    A head computes no more of them, and each takes a pass of its own. It does so before the results are known by which
    the next step is planned, so what they change counts one step later.
    """
    if not limits.num_drafts or not len(rows):
        return 0
    allowed = _allowed_drafts(rows, columns, limits, if_refused=True)
    if not allowed.any():
        return 0
    return most_drafts(columns, rows, allowed, draft_cost(len(rows), limits.weight_read_tokens))


def _allowed_drafts(rows: Int64Array, columns: ReqColumns, limits: SchedulerLimits, if_refused: bool) -> Int64Array:
    """Of each request, whatever they are worth. ``if_refused``: see ReqColumns."""
    most = min(limits.num_drafts, limits.batch_max_tokens // len(rows) - 1)
    allowed = columns.max_drafts(rows, max(most, 0), if_refused)
    if limits.weight_read_tokens and len(rows) > FEW_DECODES:
        allowed[columns.may_draft[rows] >= MAY_DRAFT_IF_FEW] = 0
    if limits.has_synthetic_drafts or limits.num_stages > 1:  # only the last stage knows what a grammar allows
        allowed[columns.may_draft[rows] == MAY_DRAFT_BY_GRAMMAR] = 0
    return allowed
