"""Which experts the tokens of requests were routed to, from the KV slots of the model to the results of steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightserve.common.device import AsyncCopy, copy_to_host, to_device
from lightserve.worker.batch.infer_req import InferReq


class StepExperts:
    """Of the tokens of some requests, on their way to the host."""

    def __init__(self, req_ids: Sequence[int] = (), counts: Sequence[int] = (), rows: Tensor | None = None) -> None:
        """``rows``: of one request after the other, as many as ``counts``."""
        self._req_ids = req_ids
        self._counts = counts
        self._to_host: AsyncCopy | None = None if rows is None else copy_to_host(rows)

    def by_req(self) -> dict[int, bytes]:
        """Wait for them."""
        if self._to_host is None:
            return {}
        (rows,) = self._to_host.tensors()
        by_req = np.split(rows.numpy(), np.cumsum(self._counts)[:-1])
        return {req_id: of_req.tobytes() for req_id, of_req in zip(self._req_ids, by_req, strict=True)}


NO_EXPERTS = StepExperts()


class ExpertsReader:
    def __init__(self, table: Tensor, req_to_token: Tensor) -> None:
        """``table``: by KV slot. ``req_to_token``: the slots of a request's tokens."""
        self._table = table
        self._req_to_token = req_to_token

    @torch.inference_mode()
    def read(self, reqs: Sequence[InferReq]) -> StepExperts:
        """Of the tokens that are computed and were not read yet. The step is launched that computes the last ones."""
        wanted = [req for req in reqs if req.sampling.routed_experts]
        if not wanted:
            return NO_EXPERTS
        begins = np.array([req.returned_experts for req in wanted])
        counts = np.array([req.cache_len for req in wanted]) - begins
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) + np.repeat(begins - ends + counts, counts)
        rows = np.repeat(np.array([req.row for req in wanted]), counts)
        index = to_device(np.stack((rows, positions)).astype(np.int64), self._table.device)
        slots = self._req_to_token[index[0], index[1]]
        for req in wanted:
            req.returned_experts = int(req.cache_len)
        return StepExperts([req.req_id for req in wanted], counts.tolist(), self._table[slots.long()])
