"""The numbers of requests that change with every step, in columns: one numpy call plans or reports all decodes.

A request has a row of its own while it waits, and a row of the batch while it runs. Its properties read and write
whichever row it has, so other code need not know.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightserve.config.speculation import MAX_DRAFTS
from lightserve.messages.int_arrays import Int32Array, Int64Array, Tails, int32s
from lightserve.messages.step import TokenColumns
from lightserve.router.draft_rates import DraftRates

FIELDS = (
    "prompt_len",
    "max_new_tokens",
    "shared_len",  # how many of its KV slots, at the start, belong to the cache
    "planned_len",  # tokens whose KV is cached, computed, or computed by a planned step, at least
    "certain_len",  # of these, the tokens whose step has completed
    "planned_outputs",  # output tokens that exist after the planned steps, at least, not counting forced ones
    "planned_drafts",  # of steps in flight: so many more tokens there may be, if all are accepted
    "output_len",  # output tokens that are known
    "is_plain",  # 1: only its length, an end token of the model or its grammar ends it
    "admission",  # number of its admission; 0: it does not run
    "planned_step",  # number of the last step that computes some of its tokens
    "may_draft",  # 1: steps may compute drafts of its next tokens; or one of those below
    "has_drafted",  # 1: a step since its admission computes drafts
    "num_accepted",  # drafts among the tokens that it gets next
    "ready_drafts",  # that its next step may have: a head computes them, or the last stage of a pipeline has sent them
    "spare_slots",  # KV slots that it has for the tokens after ``planned_len``; drafts are written there
    "draft_pause",  # decodes until the next draft is tried
    "last_pause",  # the length of the last such pause; 0: a draft was accepted since
    "is_background",  # 1: nobody waits for it
)
MAY_DRAFT_IF_FEW = 2  # its rules depend on its tokens: the workers wait for those of all requests before such a step
MAY_DRAFT_BY_GRAMMAR = 3  # the same, and no schedule may accept what its grammar does not allow
FIRST_ACCEPTANCE = 0.7  # of a request without drafts so far
MOST_ACCEPTANCE = 0.999  # no draft is certain
SPARE_SLOTS = FIELDS.index("spare_slots")
PLANNING = FIELDS.index("planned_drafts") + 1  # the fields up to here say what to plan


class ReqColumns:
    def __init__(self, rows: int) -> None:
        self.values = np.zeros((len(FIELDS), rows), dtype=np.int64)
        (
            self.prompt_len,
            self.max_new_tokens,
            self.shared_len,
            self.planned_len,
            self.certain_len,
            self.planned_outputs,
            self.planned_drafts,
            self.output_len,
            self.is_plain,
            self.admission,
            self.planned_step,
            self.may_draft,
            self.has_drafted,
            self.num_accepted,
            self.ready_drafts,
            self.spare_slots,
            self.draft_pause,
            self.last_pause,
            self.is_background,
        ) = self.values
        self.last_token_s: npt.NDArray[np.float64] = np.zeros(rows)
        self.acceptance: npt.NDArray[np.float64] = np.full(rows, FIRST_ACCEPTANCE)  # share of the drafts it reached
        self.proposals: npt.NDArray[np.float64] = np.ones(rows)  # share of its steps with drafts that had proposals
        self.draft_rates = DraftRates()  # of all requests
        self.draft_ids: Int32Array = np.zeros((rows, MAX_DRAFTS), dtype=np.int32)  # if the last stage has sent them
        self.slots = Tails(rows)  # of KV
        self.outputs = Tails(rows)  # token ids

    def unplanned(self, rows: Int64Array) -> Int64Array:
        """Tokens without planned KV, among those that are known after the steps planned so far.

        A planned step may sample the last token, whose KV is never needed.
        """
        prompt_len, max_new_tokens, _, planned_len, _, planned_outputs, drafts = self.values[:PLANNING, rows]
        return np.where(planned_outputs + drafts >= max_new_tokens, 0, prompt_len + planned_outputs - planned_len)

    def max_drafts(self, rows: Int64Array, most: int, if_refused: bool) -> Int64Array:
        """How many drafts the next step may compute after the next token of each of these requests.

        ``if_refused``: so will be all drafts in flight.
        """
        prompt_len, max_new_tokens, _, planned_len, _, planned_outputs, drafts = self.values[:PLANNING, rows]
        may_draft = (self.may_draft[rows] > 0) & (planned_len >= prompt_len)
        left = max_new_tokens - planned_outputs - 1 - (0 if if_refused else drafts)
        return np.where(may_draft, np.clip(left, 0, most), 0)

    def missing_slots(self, rows: Int64Array, drafts: Int64Array) -> Int64Array:
        """KV slots that these requests need for their next token and so many drafts, beside those that they have."""
        missing: Int64Array = np.maximum(self.planned_drafts[rows] + 1 + drafts - self.spare_slots[rows], 0)
        return missing

    def tokens_a_step(self, rows: Int64Array, num_drafts: int) -> npt.NDArray[np.float64]:
        """By how much the output of each of these requests grows in a step, by the drafts that were accepted so far.

        A draft counts only if all before it are accepted too. A request that pauses has none.
        """
        acceptance = np.clip(self.acceptance[rows], 0.0, MOST_ACCEPTANCE)
        with_drafts = (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)
        has_drafts = (self.may_draft[rows] > 0) & (self.draft_pause[rows] == 0)
        return np.where(has_drafts, 1.0 + self.proposals[rows] * (with_drafts - 1.0), 1.0)

    def accept(self, rows: Int64Array) -> None:
        """Their drafts in ``num_accepted`` become planned tokens."""
        counts = self.num_accepted[rows]
        self.planned_len[rows] += counts
        self.planned_outputs[rows] += counts
        self.spare_slots[rows] -= counts
        self.num_accepted[rows] = 0

    def take_proposals(self, rows: Int64Array, proposals: TokenColumns) -> None:
        """Drafts of the requests in these rows, for their next steps."""
        counts = int32s(proposals.each_counts)
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self.draft_ids[np.repeat(rows, counts), numbers] = int32s(proposals.token_ids)
        self.ready_drafts[rows] = counts

    def in_flight(self, rows: Int64Array) -> Int64Array:
        """Steps in flight that will return output tokens."""
        return self.planned_outputs[rows] - self.output_len[rows]

    def copy_row(self, row: int, source: ReqColumns, source_row: int) -> None:
        """The tails of both rows are empty."""
        self.values[:, row] = source.values[:, source_row]
        self.last_token_s[row] = source.last_token_s[source_row]
        self.acceptance[row] = source.acceptance[source_row]
        self.proposals[row] = source.proposals[source_row]
        self.draft_ids[row] = source.draft_ids[source_row]
