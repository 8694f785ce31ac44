"""Several proposers, one before the other: what a client predicts is better than what a head drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightserve.common.device import to_device
from lightserve.messages.int_arrays import Int64Array
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.sampling.verification import NO_DRAFT
from lightserve.worker.speculation.proposer import Proposer


class OfPredictions:
    """Asks a proposer for the drafts of requests that have a prediction. The others get none."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def propose(self, reqs: Sequence[InferReq], counts: Int64Array, ready_len: Tensor) -> Tensor:
        is_predicted = np.array([bool(req.sampling.prediction_ids) for req in reqs], dtype=bool)
        drafts = torch.full((int(counts.sum()),), NO_DRAFT, dtype=torch.int64, device=ready_len.device)
        wanted = np.where(is_predicted, counts, 0)
        if wanted.any():
            places = to_device(np.flatnonzero(np.repeat(is_predicted, counts)), drafts.device)
            drafts.index_copy_(0, places, self._proposer.propose(reqs, wanted, ready_len))
        return drafts


class FirstMatch:
    """A request has all its drafts from the first of two proposers, or from the second if that has no first draft."""

    def __init__(self, first: OfPredictions, second: Proposer) -> None:
        self._first = first
        self._second = second

    def propose(self, reqs: Sequence[InferReq], counts: Int64Array, ready_len: Tensor) -> Tensor:
        if not any(req.sampling.prediction_ids for req in reqs):
            return self._second.propose(reqs, counts, ready_len)
        drafts = self._first.propose(reqs, counts, ready_len)
        begins = to_device(np.repeat(np.cumsum(counts) - counts, counts), drafts.device)
        return torch.where(drafts[begins] != NO_DRAFT, drafts, self._second.propose(reqs, counts, ready_len))
