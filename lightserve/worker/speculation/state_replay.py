"""Recurrent layers in a step with drafts: their states must not see the drafts that are rejected.

The step computes requests with drafts from their states, and keeps no new ones. When the drafts are verified, the ops
that read and write states are computed again for the accepted tokens alone, with the same inputs. That takes no product
with a weight, and no memory for a state behind each draft.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.worker.speculation.draft_input import DraftTensors, VerifiedCounts

NOT_VERIFIED = -1  # in place of the accepted drafts of a request


class StateReplay:
    def __init__(self, batch: ops.StateBatch, tensors: DraftTensors, num_reqs: int, max_drafts: int) -> None:
        """``num_reqs``: the first requests of the step, among which are all that have drafts."""
        self._batch = batch
        self._tensors = tensors
        self._num_reqs = num_reqs
        self._max_tokens = max_drafts + 1
        self._is_drafting = tensors.draft_counts > 0
        write_row = torch.where(self._is_drafting, ops.NO_ROW, batch.b_write_row)
        self.recording = replace(batch, b_write_row=write_row, plans={}, recorded=[])  # for the step itself

    def advance(self, counts: VerifiedCounts) -> None:
        """Let the states see the accepted tokens of the step, once: it changes what it reads."""
        assert self.recording.recorded is not None
        self.advance_some(counts.tokens[self._tensors.first_rows.long()].int() - 1)
        self.recording.recorded.clear()

    def advance_some(self, b_accepted: Tensor) -> None:
        """The same of some requests. ``b_accepted`` ``[requests]`` int32: drafts; NOT_VERIFIED of the others."""
        assert self.recording.recorded is not None
        batch = self._accepted(b_accepted)
        for state_op in self.recording.recorded:
            state_op(batch)

    def _accepted(self, b_accepted: Tensor) -> ops.StateBatch:
        """Each request of the step becomes two: its accepted tokens, and those after them, which change no state."""
        num, batch, tensors = self._num_reqs, self._batch, self._tensors
        is_known = self._is_drafting & (b_accepted != NOT_VERIFIED)
        computed = tensors.q_len - tensors.draft_counts + b_accepted
        starts = batch.b1_start[:num]
        ends = starts + torch.where(is_known, computed, 0)[:num]
        write_row = torch.where(is_known, batch.b_write_row, ops.NO_ROW)[:num]
        none = torch.full_like(write_row, ops.NO_ROW)
        return ops.StateBatch(
            torch.cat((_alternating(starts, ends), batch.b1_start[num : num + 1])),
            _alternating(batch.b_read_row[:num], none),
            _alternating(write_row, none),
            max_tokens=self._max_tokens,
        )


def _alternating(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack((first, second), dim=1).flatten()
