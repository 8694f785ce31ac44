"""The outputs of requests that have ended, where drafts of later ones may come from: speculation's method suffix.

Only requests with the same salt and adapter see each other's outputs, as in the prefix cache.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import msgspec
import numpy as np

from lightserve.messages.int_arrays import Int32Array, int32s
from lightserve.messages.params import MAX_PREDICTION
from lightserve.messages.step import NewReq
from lightserve.router.req import Req

MAX_SALTS = 64  # whose outputs are kept: the ones used last


class PastOutputs:
    def __init__(self, max_outputs: int, max_tokens: int = MAX_PREDICTION) -> None:
        """``max_outputs``: of one salt; 0: none is kept. ``max_tokens``: the same, of all its outputs."""
        self._max_outputs = max_outputs
        self._max_tokens = max_tokens
        self._by_salt: OrderedDict[str, deque[Int32Array]] = OrderedDict()

    def add(self, req: Req) -> None:
        """A request has ended. The oldest outputs make room."""
        if not self._max_outputs or not req.keeps_kv_cached or req.output_len < 2:
            return
        outputs = self._by_salt.setdefault(req.salt, deque())
        self._by_salt.move_to_end(req.salt)
        outputs.append(int32s(req.token_ids)[-req.output_len :][: self._max_tokens].copy())
        while len(outputs) > self._max_outputs or sum(map(len, outputs)) > self._max_tokens:
            outputs.popleft()
        while len(self._by_salt) > MAX_SALTS:
            self._by_salt.popitem(last=False)

    def predict(self, req: Req, new: NewReq) -> NewReq:
        """The request as it enters the workers. Drafts come from those outputs, unless the client sent a prediction."""
        outputs = self._by_salt.get(req.salt)
        if not outputs or not req.keeps_kv_cached or not new.sampling.speculative or new.sampling.prediction_ids:
            return new
        self._by_salt.move_to_end(req.salt)
        ids = tuple(np.concatenate([*reversed(outputs)]).tolist())  # the newest first: workers may drop the end
        return msgspec.structs.replace(new, sampling=msgspec.structs.replace(new.sampling, prediction_ids=ids))
