"""Several steps in a row in which every running request decodes and nothing else happens.

The simulator plans most of its steps like this. A step costs it one allocation of slots. The requests and the batch
learn of all steps at once, when something else happens. Then everything is as if each step had been planned and
processed by itself.
"""

from __future__ import annotations

import numpy as np

from lightserve.common.kv.token_slots import Slots
from lightserve.router.scheduler.batch import RunningBatch
from lightserve.utils.int_arrays import Int64Array

OneStep = tuple[Slots, Int64Array]  # the slots of the step, and the tokens of each request after it


class DecodeRun:
    def __init__(self, batch: RunningBatch) -> None:
        columns = batch.columns
        self.rows = batch.rows
        self.req_ids = batch.req_ids(self.rows)
        left = columns.max_new_tokens[self.rows] - 1 - columns.planned_outputs[self.rows]
        self.max_steps = int(left.min())  # so many cannot end a request by its length
        self._batch = batch
        self._pool = batch.pool
        self._slots: list[Slots] = []  # of each step

    def __len__(self) -> int:
        """Steps that are planned."""
        return len(self._slots)

    def plan(self) -> bool:
        """Plan one more step. False: there is no memory, and requests must be preempted."""
        count = len(self.rows)
        if self._pool.available < count:
            return False
        self._slots.append(self._pool.alloc(count))
        return True

    def apply(self, token_ids: list[int], last_token_s: float) -> list[OneStep]:
        """Give the requests what was planned. All of them have got ``token_ids``, the last at ``last_token_s``.

        Returns the steps that are in flight.
        """
        batch, rows, ended = self._batch, self.rows, len(token_ids)
        columns = batch.columns
        begin = columns.planned_len[rows]
        batch.append_decodes(rows, np.array(self._slots, dtype=np.int32).T, token_ids)
        if ended:
            columns.certain_len[rows] = begin + ended
            columns.last_token_s[rows] = last_token_s
        return [(self._slots[step], begin + step + 1) for step in range(ended, len(self._slots))]


def find_decode_run(batch: RunningBatch, num_planned: int) -> DecodeRun | None:
    """The steps after step ``num_planned``, if that one returns a token of every request, and nobody waits."""
    columns, rows = batch.columns, batch.rows
    if not len(rows) or bool((columns.planned_step[rows] != num_planned).any()):
        return None
    prompt_len, planned_len = columns.prompt_len[rows], columns.planned_len[rows]
    decodes = (columns.unplanned(rows) == 1) & (planned_len >= prompt_len) & (columns.is_plain[rows] > 0)
    return DecodeRun(batch) if bool(decodes.all()) else None
