"""How many drafts the requests of a step get: those with which it gives the most tokens in its time.

The j-th draft counts only if all before it are accepted too. Its chance is the product of theirs: of each, the
acceptance of its request, which is the share of the drafts that were reached, times what DraftRates knows of its place.
Whether it is accepted or not, it makes the step longer: see ``draft_cost``. So a step gets drafts in the order of their
chances, as long as expected tokens over expected time grow. A draft of one request is then worth as much as one of
another, and a step whose drafts are worth nothing has none.

Of some steps the proposer has no drafts: no n-gram occurs again. That says nothing of the drafts that it does propose.
But unless the worker leaves such drafts out, the step computes them all the same. So the chance of all drafts of a
request is multiplied by how often it had proposals.

A request without drafts in this order tries one after a pause. The pause doubles each time that this one is refused. If
none was proposed, it only lasts until the draft cost little of the time. So a request that never repeats itself loses
little.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lightserve.messages.int_arrays import Int64Array, int32s
from lightserve.messages.step import DraftColumns
from lightserve.router.req_columns import MOST_ACCEPTANCE, ReqColumns

WEIGHT = 0.3  # of the last draft that was reached
FIRST_PAUSE, LONGEST_PAUSE = 8, 128  # decodes
LEAST_COST = 0.03  # proposals and verification take time too
LEAST_ACCEPTANCE = 1e-3
MOST_LOST = 0.01  # of the time, by a request whose drafts are never proposed


def draft_cost(num_decodes: int, weight_read_tokens: float) -> float:
    """How much longer a step of so many decodes takes with one draft for each, as a share of its time.

    A step reads all weights, which takes as long as computing ``weight_read_tokens`` tokens. 0: drafts cost nothing.
    """
    if not weight_read_tokens:
        return 0.0
    return max(num_decodes / (num_decodes + weight_read_tokens), LEAST_COST)


def drafts_worth(
    columns: ReqColumns, rows: Int64Array, allowed: Int64Array, cost: float, leaves_out: bool = False
) -> Int64Array:
    """How many drafts the next step should have for each of its decodes. Counts down their pauses.

    ``allowed``: of each, at most. ``leaves_out``: the worker computes no draft without a proposal. Then such a draft
    costs nothing, and a request tries again in the next step.
    """
    if not cost or not len(rows):
        return allowed
    is_paused = columns.draft_pause[rows] > 0
    columns.draft_pause[rows] -= is_paused
    chances = _chances(columns, rows, int(allowed.max()))
    if not leaves_out:
        chances[:, :1] *= columns.proposals[rows, None]
    counts = _most_productive(chances, np.where(is_paused, 0, allowed), cost)
    is_tried = (counts == 0) & (allowed > 0) & ~is_paused
    if not leaves_out:  # the next steps are planned before it is known what became of this one
        columns.draft_pause[rows[is_tried]] = np.maximum(columns.last_pause[rows[is_tried]], FIRST_PAUSE)
    return np.where(is_tried, 1, counts)


def most_drafts(columns: ReqColumns, rows: Int64Array, allowed: Int64Array, cost: float) -> int:
    """The most drafts of a request for which ``drafts_worth`` would give these decodes now. Changes nothing."""
    if not cost:
        return int(allowed.max())
    allowed = np.where(columns.draft_pause[rows] > 0, 0, allowed)
    most = int(allowed.max())
    if not most:
        return 0
    return max(int(_most_productive(_chances(columns, rows, most), allowed, cost).max()), 1)  # one is tried


def _chances(columns: ReqColumns, rows: Int64Array, most: int) -> npt.NDArray[np.float64]:
    """``[requests, drafts]``, of each draft if all before it are accepted."""
    return columns.acceptance[rows, None] * columns.draft_rates.factors(most)


def _most_productive(acceptance: npt.NDArray[np.float64], allowed: Int64Array, cost: float) -> Int64Array:
    """The drafts of each request with which a step gives the most tokens in its time.

    ``acceptance``: ``[requests, drafts]``, of each draft if all before it are accepted.
    """
    numbers = np.arange(1, acceptance.shape[1] + 1)
    is_allowed = numbers <= allowed[:, None]
    chances = np.clip(acceptance, LEAST_ACCEPTANCE, MOST_ACCEPTANCE).cumprod(-1)
    ordered = np.sort(chances[is_allowed])[::-1]
    if not len(ordered):
        return allowed
    tokens = len(allowed) + np.cumsum(ordered)
    seconds = 1 + cost / len(allowed) * np.arange(1, len(ordered) + 1)  # in steps without drafts
    best = int(np.argmax(tokens / seconds))
    if tokens[best] / seconds[best] <= len(allowed):
        return np.zeros_like(allowed)
    counts: Int64Array = (is_allowed & (chances >= ordered[best])).sum(-1)
    return counts


def observe_drafts(columns: ReqColumns, rows: Int64Array, drafts: DraftColumns, cost: float) -> None:
    """Learn from the drafts of a step. ``rows``: of their requests, in the same order."""
    proposed, accepted = (int32s(counts).astype(np.int64) for counts in (drafts.proposed, drafts.accepted))
    is_proposed = proposed > 0
    columns.proposals[rows] += WEIGHT * (is_proposed - columns.proposals[rows])
    is_missed = ~is_proposed & (columns.proposals[rows] * columns.acceptance[rows] < cost)
    pause = min(max(math.ceil(cost / MOST_LOST), FIRST_PAUSE), LONGEST_PAUSE)
    columns.draft_pause[rows[is_missed]] = pause
    _observe_proposed(columns, rows[is_proposed], proposed[is_proposed], accepted[is_proposed], cost)


def _observe_proposed(
    columns: ReqColumns, rows: Int64Array, proposed: Int64Array, accepted: Int64Array, cost: float
) -> None:
    """Learn from requests with proposals."""
    reached = np.minimum(accepted + 1, proposed)  # those after the first refused one were not reached
    columns.draft_rates.observe(columns.acceptance[rows], reached, accepted)
    keep = (1 - WEIGHT) ** reached
    columns.acceptance[rows] = keep * columns.acceptance[rows] + (1 - keep) * accepted / reached
    is_worth_none = (accepted == 0) & (columns.acceptance[rows] < cost)
    longer = np.clip(2 * columns.last_pause[rows], FIRST_PAUSE, LONGEST_PAUSE)
    columns.draft_pause[rows] = np.where(is_worth_none, longer, np.where(accepted > 0, 0, columns.draft_pause[rows]))
    columns.last_pause[rows] = np.where(is_worth_none, longer, np.where(accepted > 0, 0, columns.last_pause[rows]))
