"""Which tokens the penalised requests have seen, kept on the device: a step sends only the newest of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightserve.common.device import to_device
from lightserve.worker.infer_batch import InferReq

IN_PROMPT = 1  # once, however often the prompt has the token
IN_OUTPUT = 2  # for each time


class SeenTokens:
    """A table ``[req.row, token]`` as ``ops.Penalties.seen`` defines it.

    A request that comes to own a row counts it anew, so nobody has to tell when one leaves. Rows are added when the
    requests that run at once need them: 0.6 MB each for a vocabulary of 150,000.
    """

    def __init__(self, vocab: int, last_ids: Tensor) -> None:
        self.table = torch.zeros((0, vocab), dtype=torch.int32, device=last_ids.device)
        self._last_ids = last_ids  # by row; the host may not know them yet

    def update(self, reqs: Sequence[InferReq]) -> None:
        """Count the tokens that these requests have got since the last time."""
        self._reserve(max(req.row for req in reqs) + 1)
        vocab = self.table.shape[1]
        entries: list[int] = []  # in the flat table; one may come twice
        waiting: list[int] = []  # rows whose last token only the device knows
        for req in reqs:
            if req.counted_len == 0:
                self._count_prompt(req)
            known = req.token_ids[req.counted_len :]
            entries += [req.row * vocab + token for token in known]
            req.counted_len += len(known)
            if req.counted_len < req.total_len:
                waiting.append(req.row)
                req.counted_len += 1
        if entries:
            self._count(to_device(np.array(entries), self.table.device))
        if waiting:
            rows = to_device(np.array(waiting), self.table.device)
            self._count(rows * vocab + self._last_ids[rows].clamp(min=0))  # who got no token is about to end

    def _count(self, entries: Tensor) -> None:
        self.table.view(-1).index_add_(0, entries, self.table.new_full(entries.shape, IN_OUTPUT))

    def _reserve(self, rows: int) -> None:
        held, vocab = self.table.shape
        if rows > held:
            more = self.table.new_zeros((max(rows, 2 * held) - held, vocab))
            self.table = torch.cat((self.table, more))

    def _count_prompt(self, req: InferReq) -> None:
        prompt = np.array(req.token_ids[: req.prompt_len])
        known = to_device(prompt[prompt < self.table.shape[1]], self.table.device)
        self.table[req.row] = 0
        self.table[req.row, known] = IN_PROMPT
        req.counted_len = req.prompt_len
