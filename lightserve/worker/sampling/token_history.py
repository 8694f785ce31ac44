"""The tokens so far of requests whose sampling depends on them, on the device. A step adds only the newest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightserve.common.device import to_device
from lightserve.worker.batch.infer_req import InferReq

Entries = list[tuple[int, int]]  # req.row, token
IN_PROMPT = 1  # once, however often the prompt has the token
IN_OUTPUT = 2  # for each occurrence


class TokenHistory:
    """What penalties and watermarks need of the tokens so far.

    It is recorded before a step is launched: the step overwrites ``last_ids``, the sampled token of each row.
    """

    def __init__(self, vocab: int, last_ids: Tensor) -> None:
        self.last_tokens: Tensor | None = None  # [watermarked] int64
        self.seen: SeenTokens | None = None  # made with the first penalised request: it takes memory
        self._vocab = vocab
        self._last_ids = last_ids

    def count(self, penalised: Sequence[InferReq]) -> None:
        if self.seen is None:
            self.seen = SeenTokens(self._vocab, self._last_ids)
        self.seen.update(penalised)

    def record_last(self, watermarked: Sequence[InferReq]) -> None:
        device = self._last_ids.device
        known = [-1 if req.has_token_in_flight else int(req.token_ids[-1]) for req in watermarked]
        host = to_device(np.array(known, dtype=np.int64), device)
        rows = to_device(np.array([req.row for req in watermarked], dtype=np.int64), device)
        self.last_tokens = torch.where(host < 0, self._last_ids[rows], host)


class SeenTokens:
    """A table ``[req.row, token]`` as ``ops.Penalties.seen`` defines it.

    A request that gets a row counts its tokens anew, so nothing has to happen when a request leaves. The table grows
    with the number of requests that run at once: a row takes 0.6 MB for a vocabulary of 150,000.
    """

    def __init__(self, vocab: int, last_ids: Tensor) -> None:
        self.table = torch.zeros((0, vocab), dtype=torch.int32, device=last_ids.device)
        self._last_ids = last_ids  # by row; the newest may be in flight to the host

    def update(self, reqs: Sequence[InferReq]) -> None:
        """Count the tokens that these requests have got since the last call."""
        self._reserve(max(req.row for req in reqs) + 1)
        vocab = self.table.shape[1]
        entries: list[int] = []  # of the flat table; one may occur twice
        in_flight: list[int] = []  # rows whose last token only the device knows
        for req in reqs:
            if req.counted_len == 0:
                self._count_prompt(req)
            known = req.token_ids[req.counted_len :]
            entries += [req.row * vocab + token for token in known.tolist()]
            req.counted_len += len(known)
            if req.counted_len < req.total_len:
                in_flight.append(req.row)
                req.counted_len += 1
        if entries:
            self._count(to_device(np.array(entries), self.table.device))
        if in_flight:
            rows = to_device(np.array(in_flight), self.table.device)
            self._count(rows * vocab + self._last_ids[rows].clamp(min=0))  # a request without a token is about to end

    def add(self, entries: Entries, times: int = 1) -> None:
        """Count tokens that may be taken back with -1 ``times``. They do not count as those of ``update`` do."""
        vocab = self.table.shape[1]
        flat = [row * vocab + token for row, token in entries if token < vocab]
        if flat:
            self._count(to_device(np.array(flat), self.table.device), times)

    def _count(self, entries: Tensor, times: int = 1) -> None:
        self.table.view(-1).index_add_(0, entries, self.table.new_full(entries.shape, times * IN_OUTPUT))

    def _reserve(self, rows: int) -> None:
        held, vocab = self.table.shape
        if rows > held:
            more = self.table.new_zeros((max(rows, 2 * held) - held, vocab))
            self.table = torch.cat((self.table, more))

    def _count_prompt(self, req: InferReq) -> None:
        prompt = req.token_ids[: req.prompt_len].astype(np.int64)
        known = to_device(prompt[prompt < self.table.shape[1]], self.table.device)
        self.table[req.row] = 0
        self.table[req.row, known] = IN_PROMPT
        req.counted_len = req.prompt_len
