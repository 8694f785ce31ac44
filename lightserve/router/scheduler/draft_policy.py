"""How many drafts a request gets: as many as its acceptance is worth.

The j-th draft counts only if all before it are accepted too. If a share ``a`` of the drafts that were reached is
accepted, the chance of that is a ** j. Whether it is accepted or not, it makes the step longer by ``draft_cost``. So a
request gets the drafts whose chance is higher than their cost.

With few accepted drafts a request gets none, and one is tried after a pause. The pause doubles each time that this one
is refused. So a request that never repeats itself loses little.
"""

from __future__ import annotations

import numpy as np

from lightserve.messages.int_arrays import Int64Array, int32s
from lightserve.messages.step import DraftColumns
from lightserve.router.req_columns import ReqColumns

WEIGHT = 0.3  # of the last draft that was reached
FIRST_PAUSE, LONGEST_PAUSE = 8, 128  # decodes
LEAST_COST = 0.03  # of a step with drafts, which is launched from Python
LEAST_ACCEPTANCE, MOST_ACCEPTANCE = 1e-3, 0.999  # 0 and 1 have no useful logarithm


def draft_cost(num_decodes: int, weight_read_tokens: float) -> float:
    """How much longer a step of so many decodes takes with one draft for each, as a share of its time.

    A step reads all weights, which takes as long as computing ``weight_read_tokens`` tokens. 0: drafts cost nothing.
    """
    if not weight_read_tokens:
        return 0.0
    return max(num_decodes / (num_decodes + weight_read_tokens), LEAST_COST)


def drafts_worth(columns: ReqColumns, rows: Int64Array, most: int, cost: float) -> Int64Array:
    """How many drafts the next step should have for each of these requests. Counts down their pauses."""
    if not cost:
        return np.full(len(rows), most, dtype=np.int64)
    acceptance = np.clip(columns.acceptance[rows], LEAST_ACCEPTANCE, MOST_ACCEPTANCE)
    wanted = np.clip(np.log(cost) / np.log(acceptance), 1, most).astype(np.int64)
    is_paused = columns.draft_pause[rows] > 0
    columns.draft_pause[rows] -= is_paused
    return np.where(is_paused, 0, wanted)


def observe_drafts(columns: ReqColumns, rows: Int64Array, drafts: DraftColumns, cost: float) -> None:
    """Learn from the drafts of a step. ``rows``: of their requests, in the same order."""
    proposed, accepted = int32s(drafts.proposed), int32s(drafts.accepted)
    # those after the first refused one were not reached; a step without a proposal counts as one refused draft
    reached = np.maximum(np.minimum(accepted + 1, proposed), 1)
    keep = (1 - WEIGHT) ** reached
    columns.acceptance[rows] = keep * columns.acceptance[rows] + (1 - keep) * accepted / reached
    is_worth_none = (accepted == 0) & (columns.acceptance[rows] < cost)
    longer = np.clip(2 * columns.last_pause[rows], FIRST_PAUSE, LONGEST_PAUSE)
    columns.draft_pause[rows] = np.where(is_worth_none, longer, 0)
    columns.last_pause[rows] = np.where(is_worth_none, longer, np.where(accepted > 0, 0, columns.last_pause[rows]))
