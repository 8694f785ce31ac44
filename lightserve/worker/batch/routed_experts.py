"""Which experts the tokens of requests were routed to, from the KV slots of the model to the results of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightserve.common.device import AsyncCopy, copy_to_host, to_device
from lightserve.messages.int_arrays import Int64Array
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.speculation.draft_input import DraftInput


class StepExperts:
    """Of the tokens of some requests, on their way to the host."""

    def __init__(self, req_ids: Sequence[int] = (), counts: Sequence[int] = (), rows: Tensor | None = None) -> None:
        """``rows``: of one request after the other, as many as ``counts``."""
        self._req_ids = req_ids
        self._counts = counts
        self._to_host: AsyncCopy | None = None if rows is None else copy_to_host(rows)

    def by_req(self) -> dict[int, np.ndarray]:
        """Wait for them. The last tokens of a request are the drafts of the step, accepted or not."""
        if self._to_host is None:
            return {}
        (rows,) = self._to_host.tensors()
        return dict(zip(self._req_ids, np.split(rows.numpy(), np.cumsum(self._counts)[:-1]), strict=True))


NO_EXPERTS = StepExperts()


class StepSlots(NamedTuple):
    """The tokens of requests in a step with drafts, whose positions the host may not know."""

    slots: Tensor  # of all tokens of the step
    start: Int64Array  # the first token of each request
    q_len: Int64Array  # its tokens
    drafts: Int64Array  # of them, the last ones

    @classmethod
    def of(cls, drafts: DraftInput | None, indices: Sequence[int], slots: Tensor | None) -> StepSlots | None:
        """``indices``: of the requests in the step."""
        if drafts is None or slots is None:
            return None
        start = np.cumsum(drafts.q_len) - drafts.q_len
        return cls(slots, start[indices], drafts.q_len[indices], drafts.drafts[indices])


class ExpertsReader:
    def __init__(self, table: Tensor, req_to_token: Tensor) -> None:
        """``table``: by KV slot. ``req_to_token``: the slots of a request's tokens."""
        self._table = table
        self._req_to_token = req_to_token

    @torch.inference_mode()
    def read(self, reqs: Sequence[InferReq], of_step: StepSlots | None = None) -> StepExperts:
        """Of the tokens that are computed and were not read yet. The step is launched that computes the last ones.

        ``of_step``: of these requests, if the step has drafts. Those that will be accepted are not counted yet.
        """
        chosen = [index for index, req in enumerate(reqs) if req.sampling.routed_experts]
        if not chosen:
            return NO_EXPERTS
        wanted = [reqs[index] for index in chosen]
        begins, ends = np.array([(req.returned_experts, req.cache_len) for req in wanted]).T
        num_known = ends - begins  # tokens whose positions are known
        num_in_step = np.zeros_like(num_known)
        if of_step is not None:
            num_in_step = of_step.q_len[chosen]
            num_known -= num_in_step - of_step.drafts[chosen]
        slots = self._slots(wanted, begins, num_known)
        if of_step is not None:
            in_step = of_step.slots[to_device(_ranges(of_step.start[chosen], num_in_step), self._table.device)]
            slots = torch.cat((slots, in_step))[to_device(_interleaved(num_known, num_in_step), self._table.device)]
        for req in wanted:
            req.returned_experts = int(req.cache_len)
        return StepExperts(
            [req.req_id for req in wanted], (num_known + num_in_step).tolist(), self._table[slots.long()]
        )

    def _slots(self, reqs: Sequence[InferReq], begins: Int64Array, counts: Int64Array) -> Tensor:
        """Of the next ``counts`` tokens of each request."""
        rows = np.repeat(np.array([req.row for req in reqs]), counts)
        index = to_device(np.stack((rows, _ranges(begins, counts))).astype(np.int64), self._table.device)
        return self._req_to_token[index[0], index[1]]


def _ranges(begins: Int64Array, counts: Int64Array) -> Int64Array:
    """``counts`` numbers from each begin, joined."""
    ends = np.cumsum(counts)
    joined: Int64Array = np.arange(ends[-1]) + np.repeat(begins - ends + counts, counts)
    return joined


def _interleaved(first: Int64Array, second: Int64Array) -> Int64Array:
    """Of two joined lists with so many numbers of each request: the places that put those of a request together."""
    begins = np.stack((np.cumsum(first) - first, first.sum() + np.cumsum(second) - second), axis=1)
    return _ranges(begins.ravel(), np.stack((first, second), axis=1).ravel())
