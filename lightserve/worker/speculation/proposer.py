"""Proposes drafts of the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightserve.messages.int_arrays import Int64Array
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.sampling.verification import NO_DRAFT


class Proposer(Protocol):
    def propose(self, reqs: Sequence[InferReq], counts: Int64Array, ready_len: Tensor) -> Tensor:
        """Drafts of the requests of a step, ``counts`` of each, one request after the other: int64, on the device.

        ``ready_len`` ``[requests]`` int32, on the device, are the tokens of each request that are computed. The token
        after them was sampled last, and the drafts are those that follow it. NO_DRAFT stands for a draft that the
        proposer does not have. The host may not know the last tokens of ``reqs`` yet. All ranks must propose the same.
        """


class NoProposer:
    """Has no drafts."""

    def propose(self, reqs: Sequence[InferReq], counts: Int64Array, ready_len: Tensor) -> Tensor:
        return torch.full((int(counts.sum()),), NO_DRAFT, dtype=torch.int64, device=ready_len.device)
