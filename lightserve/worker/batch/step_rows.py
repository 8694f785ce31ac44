"""The requests of a step and what the router says of them, before they are packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lightserve.messages.int_arrays import Int32Array, Int64Array
from lightserve.worker.batch.state_rows import WrittenRows
from lightserve.worker.batch.step_input import StepShape
from lightserve.worker.speculation.draft_input import DraftCounts


class StepRows(NamedTuple):
    """The requests of a step, in columns."""

    rows: Int64Array  # of the batch
    q_len: Int64Array  # tokens that the step computes
    slots: Int32Array  # of all tokens; with drafts those that are new, or NO_SLOT
    group_slots: tuple[Int32Array, ...]  # the same in each KV group that has a pool of tokens
    token_ids: Int32Array  # the same, if the router knows them; otherwise empty
    counts: DraftCounts | None = None  # if the step has drafts
    state_rows: WrittenRows | None = None  # if the model has recurrent layers

    def captured_shape(
        self, shape: StepShape, next_drafts: int, captured_shape: Callable[[StepShape], StepShape]
    ) -> StepShape:
        """The shape of the step, padded to a captured one if there is one. ``next_drafts``: as in Step."""
        if self.counts is None:
            return captured_shape(shape)
        has_prompts = bool((self.q_len - self.counts.drafts > 1).any())
        wanted = shape._replace(has_decodes=has_prompts, has_prompts=True, num_drafts=1, next_drafts=next_drafts)
        captured = captured_shape(wanted)
        return captured if captured.num_drafts else shape

    def arranged(self, first: Int64Array) -> StepRows:
        """In another order: these requests, which have one token each, come before the others."""
        is_other = np.ones(len(self.rows), dtype=bool)
        is_other[first] = False
        order = np.concatenate((first, np.flatnonzero(is_other)))
        first_tokens = (np.cumsum(self.q_len) - self.q_len)[first]
        tokens = np.concatenate((first_tokens, np.flatnonzero(np.repeat(is_other, self.q_len))))
        group_slots = tuple([slots[tokens] for slots in self.group_slots])
        token_ids = self.token_ids[tokens] if len(self.token_ids) else self.token_ids
        state_rows = None if self.state_rows is None else self.state_rows.arranged(order)
        return StepRows(
            self.rows[order], self.q_len[order], self.slots[tokens], group_slots, token_ids, state_rows=state_rows
        )
