"""Two proposers, one before the other: what a client predicts is better than what a head drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lightserve.common.device import to_device
from lightserve.messages.int_arrays import Int64Array
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.sampling.verification import NO_DRAFT
from lightserve.worker.speculation.proposer import Proposer


class PredictionsFirst:
    """A request has all its drafts from its prediction, or from another proposer if that has no first draft."""

    def __init__(self, of_predictions: Proposer, fallback: Proposer, holds: Callable[[InferReq], bool]) -> None:
        """``of_predictions`` is asked for the drafts of requests that have a prediction, if it ``holds`` that."""
        self._holds = holds
        self._of_predictions = of_predictions
        self._fallback = fallback

    def propose(self, reqs: Sequence[InferReq], counts: Int64Array, ready_len: Tensor) -> Tensor:
        is_predicted = np.array([bool(req.sampling.prediction_ids) and self._holds(req) for req in reqs], dtype=bool)
        wanted = np.where(is_predicted, counts, 0)
        if not wanted.any():
            return self._fallback.propose(reqs, counts, ready_len)
        drafts = torch.full((int(counts.sum()),), NO_DRAFT, dtype=torch.int64, device=ready_len.device)
        places = to_device(np.flatnonzero(np.repeat(is_predicted, counts)), drafts.device)
        drafts.index_copy_(0, places, self._of_predictions.propose(reqs, wanted, ready_len))
        begins = to_device(np.repeat(np.cumsum(counts) - counts, counts), drafts.device)
        return torch.where(drafts[begins] != NO_DRAFT, drafts, self._fallback.propose(reqs, counts, ready_len))
