"""What a worker keeps of requests that have left, because later ones begin with the same tokens and KV slots.

A step of a beam search starts requests that continue those of the last step. The router names the parent of each, and
sends the tokens and slots that follow the parent's, so the size of the command does not depend on the length.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from lightserve.messages.int_arrays import Int32Array, int32s
from lightserve.messages.step import NewReq
from lightserve.worker.batch.infer_req import InferReq


class RetainedReq(NamedTuple):
    token_ids: Int32Array  # with which it entered
    slots: Int32Array  # of these tokens, as far as they are computed


class RetainedReqs:
    def __init__(self) -> None:
        self._retained: dict[int, RetainedReq] = {}  # by id

    def __len__(self) -> int:
        return len(self._retained)

    def add(self, req: InferReq) -> None:
        entered_len = len(req.leading_slots)
        slots = req.leading_slots[: min(req.cache_len, entered_len)]
        self._retained[req.req_id] = RetainedReq(req.token_ids[:entered_len], slots)

    def release(self, req_ids: Iterable[int]) -> None:
        for req_id in req_ids:
            del self._retained[req_id]

    def clear(self) -> None:
        self._retained.clear()

    def whole(self, new: NewReq) -> NewReq:
        """The request with the tokens and slots of its parent in front of its own."""
        prefix = new.parent
        if prefix is None:
            return new
        parent = self._retained[prefix.req_id]
        return msgspec.structs.replace(
            new,
            token_ids=np.concatenate((parent.token_ids[: prefix.num_tokens], int32s(new.token_ids))),
            cached_slots=np.concatenate((parent.slots[: prefix.num_slots], int32s(new.cached_slots))),
            parent=None,
        )
