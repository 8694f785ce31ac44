"""Recurrent layers in the stages of a pipeline before the last one: their states see the drafts of a step later.

Only the last stage verifies drafts. The router knows the result before it plans the next step of a request, and then
tells the other stages how many of its tokens are computed. So they keep what a step with drafts has given to its
recurrent layers, until each of its requests decodes again or leaves. Steps of other requests come between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from lightserve.common import ops
from lightserve.common.basemodel import TpPartBaseModel
from lightserve.common.device import to_device
from lightserve.messages.int_arrays import Int32Array, Int64Array
from lightserve.worker.batch.req_columns import ReqColumns
from lightserve.worker.batch.state_rows import StateColumns
from lightserve.worker.speculation.draft_input import DraftInput, DraftTensors
from lightserve.worker.speculation.state_replay import NOT_VERIFIED, StateReplay


class DraftedStep(NamedTuple):
    rows: Int64Array  # of the batch, one for each request
    drafts: DraftInput
    tensors: DraftTensors


@dataclass(frozen=True, slots=True)
class UnverifiedStep:
    """A step with drafts. The arrays have a number for each request."""

    replay: StateReplay
    rows: Int64Array  # of the batch
    entries: Int64Array  # ReqColumns.entry of those whose states have not seen the step yet; 0: of the others


class StageStates:
    def __init__(self, columns: ReqColumns, model: TpPartBaseModel) -> None:
        """``columns``: of the batch."""
        self._columns = columns
        self._model = model
        self._steps: list[UnverifiedStep] = []  # in launch order

    def record(self, batch: ops.StateBatch, on_host: StateColumns, step: DraftedStep) -> ops.StateBatch:
        """The states that a step with drafts is to be computed with, in place of ``batch``. ``on_host``: the same.

        A row that a request only reads may belong to a cached prefix, which may be evicted before the drafts are
        verified. So requests with drafts continue in the row that they write.
        """
        drafts, is_drafting = step.drafts, step.drafts.drafts > 0
        read, write = (column[: len(is_drafting)] for column in (on_host.read_row, on_host.write_row))
        self._copy(read, write, np.flatnonzero(is_drafting & (read != write)))
        read_row = torch.where(step.tensors.draft_counts > 0, batch.b_write_row, batch.b_read_row)
        replay = StateReplay(replace(batch, b_read_row=read_row), step.tensors, drafts.num_drafting, drafts.max_drafts)
        entries = np.where(is_drafting, self._columns.entry[step.rows], 0)
        self._steps.append(UnverifiedStep(replay, step.rows, entries))
        return replay.recording

    def _copy(self, read: Int32Array, write: Int32Array, indices: Int64Array) -> None:
        if not len(indices):
            return
        sources, targets = to_device(np.stack((read, write))[:, indices].astype(np.int64), self._model.device)
        for buffer in chain.from_iterable(self._model.mem_manager.state_buffers):  # [layers, rows, *shape]
            buffer.index_copy_(1, targets, buffer.index_select(1, sources))

    def advance(self, rows: Int64Array, accepted: Int32Array) -> None:
        """Of the requests in these rows, so many drafts were accepted in the last step that had some."""
        by_row = np.full(len(self._columns.entry), NOT_VERIFIED, dtype=np.int32)
        by_row[rows] = accepted
        self._steps = [step for step in self._steps if self._advance(step, by_row)]

    def _advance(self, step: UnverifiedStep, by_row: Int32Array) -> bool:
        """Whether the states of other requests have still to see the step."""
        is_waiting = (step.entries > 0) & (step.entries == self._columns.entry[step.rows])  # others have left
        b_accepted = np.where(is_waiting, by_row[step.rows], np.int32(NOT_VERIFIED))
        is_verified = b_accepted != NOT_VERIFIED
        if is_verified.any():
            step.replay.advance_some(to_device(b_accepted, self._model.device))
            step.entries[is_verified] = 0
        return bool((is_waiting & ~is_verified).any())

    def clear(self) -> None:
        self._steps.clear()
