"""Which tokens the penalised requests have seen, kept on the device: a step sends only the newest of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightserve.router.model_infer.infer_batch import InferReq

IN_PROMPT = 1  # once, however often the prompt has the token
IN_OUTPUT = 2  # for each time


class SeenTokens:
    """A table ``[req.row, token]`` as ``ops.Penalties.seen`` defines it.

    A request that comes to own a row counts it anew, so nobody has to tell when one leaves. Rows are added when the
    requests that run at once need them: 0.6 MB each for a vocabulary of 150,000.
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._table = torch.zeros((0, vocab), dtype=torch.int32, device=device)

    def update(self, reqs: Sequence[InferReq]) -> Tensor:
        """The table, in which the tokens are counted that these requests have got since the last time."""
        self._reserve(max(req.row for req in reqs) + 1)
        vocab = self._table.shape[1]
        entries: list[int] = []  # in the flat table; one may come twice
        for req in reqs:
            if req.counted_len == 0:
                self._count_prompt(req)
            first = req.row * vocab
            entries += [first + token for token in req.token_ids[req.counted_len :]]
            req.counted_len = len(req.token_ids)
        if entries:
            index = torch.from_numpy(np.array(entries)).to(self._table.device, non_blocking=True)
            self._table.view(-1).index_add_(0, index, self._table.new_full(index.shape, IN_OUTPUT))
        return self._table

    def _reserve(self, rows: int) -> None:
        held, vocab = self._table.shape
        if rows > held:
            more = self._table.new_zeros((max(rows, 2 * held) - held, vocab))
            self._table = torch.cat((self._table, more))

    def _count_prompt(self, req: InferReq) -> None:
        prompt = np.array(req.token_ids[: req.prompt_len])
        known = torch.from_numpy(prompt[prompt < self._table.shape[1]]).to(self._table.device, non_blocking=True)
        self._table[req.row] = 0
        self._table[req.row, known] = IN_PROMPT
        req.counted_len = req.prompt_len
