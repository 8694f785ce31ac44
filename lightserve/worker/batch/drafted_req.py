"""A request as the rules of sampling see it after some of its drafts."""

from __future__ import annotations

import numpy as np

from lightserve.messages.int_arrays import Int32Array
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.batch.req_columns import ReqColumns
from lightserve.worker.sampling.grammar import ReqGrammar


class DraftedReq(InferReq):
    """A request that has drafts as its last tokens, for the row of logits after them. It is good for one step."""

    def __init__(self, req: InferReq, draft_ids: Int32Array, grammar: ReqGrammar | None) -> None:
        """``req``: all its tokens are known. It must not change while this is used. ``grammar``: after the drafts."""
        self.__dict__.update(req.__dict__)
        self.columns, self.columns_row = ReqColumns(1), 0
        self.columns.copy_row(0, req.columns, req.columns_row)
        for column in (self.columns.cache_len, self.columns.known_len, self.columns.total_len):
            column[0] += len(draft_ids)
        self.draft_ids = draft_ids.tolist()
        self.grammar = grammar
        self.is_constrained = grammar is not None and not grammar.is_unconstrained
        self._certain_ids = req.token_ids

    @property
    def token_ids(self) -> Int32Array:
        return np.concatenate((self._certain_ids, np.array(self.draft_ids, dtype=np.int32)))

    def forbidden_next(self) -> list[int]:
        forbidden = super().forbidden_next()
        self.rules.forget_after(len(self._certain_ids))
        return forbidden

    def forced_next(self) -> int | None:
        if self.thinking is None or not self.may_be_forced:
            return None
        return self.thinking.forced_if(self.token_ids[self.prompt_len :].tolist())
