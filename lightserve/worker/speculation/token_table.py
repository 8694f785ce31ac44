"""The tokens of all requests on the device, where proposers look for what may follow."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightserve.common.device import to_device
from lightserve.messages.params import MAX_PREDICTION
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.sampling.verification import NO_DRAFT

PREDICTED_ROWS = 32  # with 16k tokens of prediction and 128k of text each takes 0.6 MB


class TokenTable:
    """A request has a row: its prediction, if the client sent one, NO_DRAFT, its prompt and its output.

    Steps write what they sample, so the table also has the tokens that the host does not know yet.
    """

    def __init__(self, max_reqs: int, max_len: int, device: torch.device, only_predictions: bool = False) -> None:
        """``only_predictions``: a head drafts for the other requests. See _PredictedRows."""
        self.text_begin = min(MAX_PREDICTION, max_len) + 1  # column of the first token of prompts
        self._unused = self.text_begin + max_len  # column for what is not to be kept
        num_rows = min(PREDICTED_ROWS, max_reqs) if only_predictions else max_reqs
        self._predicted = _PredictedRows(max_reqs, num_rows, device) if only_predictions else None
        shape = (num_rows + 1, self._unused + 1)
        self.token_ids = torch.zeros(shape, dtype=torch.int32, device=device)
        self.token_ids[:, self.text_begin - 1] = NO_DRAFT
        self.begins = torch.full((max_reqs + 1,), self.text_begin, dtype=torch.int32, device=device)  # by row
        self._written_len = np.zeros(max_reqs + 1, dtype=np.int64)  # by row: see ``catch_up``
        self._entered_len = torch.zeros(max_reqs + 1, dtype=torch.int32, device=device)  # by row

    def add(self, req: InferReq) -> None:
        """A request that enters the batch."""
        if self._predicted is not None and not self._predicted.take(req):
            return
        known = req.known.view
        prediction = np.array(req.sampling.prediction_ids[: self.text_begin - 1], dtype=np.int32)
        begin = self.text_begin - 1 - len(prediction)
        separator = np.full(1, NO_DRAFT, dtype=np.int32)
        token_ids = np.concatenate((prediction, separator, known[: self._unused - self.text_begin]))
        row, device = self._row(req), self.token_ids.device
        row[begin : begin + len(token_ids)] = to_device(token_ids.astype(np.int32), device)
        self.begins[req.row].fill_(begin if len(prediction) else self.text_begin)
        self._entered_len[req.row].fill_(len(known))
        self._written_len[req.row] = len(known)

    def holds(self, req: InferReq) -> bool:
        """Whether its tokens are here."""
        return self._predicted is None or req.row in self._predicted.rows

    def _row(self, req: InferReq) -> Tensor:
        return self.token_ids[req.row if self._predicted is None else self._predicted.rows[req.row]]

    def rows_of(self, b_row: Tensor) -> Tensor:
        """The rows of ``token_ids`` of requests, int64. ``b_row``: those of the batch."""
        return b_row.long() if self._predicted is None else self._predicted.on_device[b_row.long()]

    def catch_up(self, req: InferReq, computed: int) -> None:
        """Write the tokens of a request that no step has sampled: a grammar has forced them. All tokens are known.

        A step that computes one of them before the last samples something else after it, and records that. So those
        after the ``computed`` ones are written again the next time.
        """
        known = req.token_ids[: self._unused - self.text_begin]  # tokens may be forced beyond the longest text
        begin = self._written_len.item(req.row)
        if not self.holds(req):
            return
        if begin < len(known):
            row, first = self._row(req), self.text_begin + begin
            row[first : first + len(known) - begin] = to_device(known[begin:], row.device)
        self._written_len[req.row] = min(computed + 1, len(known))

    def first_column(self, reqs: list[InferReq]) -> int:
        """Of the tokens of these requests."""
        longest = max(len(req.sampling.prediction_ids) for req in reqs)
        return max(self.text_begin - 1 - longest, 0)

    def record(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Write sampled tokens. What is sampled before the end of a prompt is no token of its request.

        ``rows`` and ``positions`` are int32, ``token_ids`` int64, all of one length.
        """
        is_output = positions >= self._entered_len[rows.long()]
        columns = torch.where(is_output, positions + self.text_begin, self._unused).clamp(max=self._unused)
        self.token_ids[self.rows_of(rows), columns.long()] = token_ids.int()


class _PredictedRows:
    """Few rows for many requests: the latest that came with a prediction have one. Nobody reads that of the others."""

    def __init__(self, max_reqs: int, num_rows: int, device: torch.device) -> None:
        self.rows: dict[int, int] = {}  # by row of the batch, the oldest first
        self.on_device = torch.full((max_reqs + 1,), num_rows, dtype=torch.int64, device=device)
        self._free = list(range(num_rows))
        self._of_others = num_rows

    def take(self, req: InferReq) -> bool:
        """Whether the request gets a row. The one before it in its row of the batch has left."""
        row = self.rows.pop(req.row, None)
        if row is not None:
            self._free.append(row)
            self.on_device[req.row].fill_(self._of_others)
        if not req.sampling.prediction_ids:
            return False
        if not self._free:
            oldest = next(iter(self.rows))
            self._free.append(self.rows.pop(oldest))
            self.on_device[oldest].fill_(self._of_others)
        self.rows[req.row] = self._free.pop()
        self.on_device[req.row].fill_(self.rows[req.row])
        return True
