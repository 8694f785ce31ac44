"""The tokens of all requests on the device, where proposers look for what may follow."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightserve.common.device import to_device
from lightserve.messages.params import MAX_PREDICTION
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.sampling.verification import NO_DRAFT


class TokenTable:
    """A request has a row: its prediction, if the client sent one, NO_DRAFT, its prompt and its output.

    Steps write what they sample, so the table also has the tokens that the host does not know yet.
    """

    def __init__(self, max_reqs: int, max_len: int, device: torch.device) -> None:
        self.text_begin = min(MAX_PREDICTION, max_len) + 1  # column of the first token of prompts
        self._unused = self.text_begin + max_len  # column for what is not to be kept
        shape = (max_reqs + 1, self._unused + 1)
        self.token_ids = torch.zeros(shape, dtype=torch.int32, device=device)
        self.token_ids[:, self.text_begin - 1] = NO_DRAFT
        self.begins = torch.full((max_reqs + 1,), self.text_begin, dtype=torch.int32, device=device)  # by row
        self._written_len = np.zeros(max_reqs + 1, dtype=np.int64)  # by row: see ``catch_up``
        self._entered_len = torch.zeros(max_reqs + 1, dtype=torch.int32, device=device)  # by row

    def add(self, req: InferReq) -> None:
        """A request that enters the batch."""
        known = req.known.view
        prediction = np.array(req.sampling.prediction_ids[: self.text_begin - 1], dtype=np.int32)
        begin = self.text_begin - 1 - len(prediction)
        separator = np.full(1, NO_DRAFT, dtype=np.int32)
        token_ids = np.concatenate((prediction, separator, known[: self._unused - self.text_begin]))
        row, device = self.token_ids[req.row], self.token_ids.device
        row[begin : begin + len(token_ids)] = to_device(token_ids.astype(np.int32), device)
        self.begins[req.row].fill_(begin if len(prediction) else self.text_begin)
        self._entered_len[req.row].fill_(len(known))
        self._written_len[req.row] = len(known)

    def catch_up(self, req: InferReq, computed: int) -> None:
        """Write the tokens of a request that no step has sampled: a grammar has forced them. All tokens are known.

        A step that computes one of them before the last samples something else after it, and records that. So those
        after the ``computed`` ones are written again the next time.
        """
        known = req.token_ids[: self._unused - self.text_begin]  # tokens may be forced beyond the longest text
        begin = self._written_len.item(req.row)
        if begin < len(known):
            row, first = self.token_ids[req.row], self.text_begin + begin
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
        self.token_ids[rows.long(), columns.long()] = token_ids.int()
