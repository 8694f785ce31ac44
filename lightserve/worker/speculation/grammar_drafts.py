"""Drafts of requests with a grammar: those that it allows, and the tokens that it forces in place of others.

A row of logits after drafts is sampled with the mask of the grammar after them. A draft that the grammar forbids would
be rejected, as would those after it, so they are left out. The state of the request does not change: a copy goes ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightserve.messages.int_arrays import Int64Array
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.sampling.grammar import ReqGrammar
from lightserve.worker.sampling.verification import NO_DRAFT


class GrammarDrafts:
    """The drafts of one step."""

    def __init__(self) -> None:
        self._after: dict[int, list[ReqGrammar]] = {}  # by request: its grammar after one draft, after two ...

    def after(self, req: InferReq, count: int) -> ReqGrammar | None:
        """The grammar after so many drafts. None: there is none, or nothing is sampled there that counts."""
        after = self._after.get(req.req_id, ())
        return after[count - 1] if count <= len(after) else None

    def allowed(
        self, reqs: Sequence[InferReq], counts: Int64Array, ready_len: Int64Array, draft_ids: Int64Array
    ) -> Int64Array:
        """The drafts of a step as they should be. Its requests with a grammar have no tokens or drafts in flight.

        ``draft_ids``: ``counts`` of each request, one request after the other. ``ready_len``: their tokens that are
        computed. If tokens follow that the grammar has forced, there are no drafts.
        """
        allowed = draft_ids.copy()
        ends = np.cumsum(counts)
        for index in np.flatnonzero(counts).tolist():
            req, of_req = reqs[index], slice(int(ends[index] - counts[index]), int(ends[index]))
            if req.grammar is None:
                continue
            has_forced = req.known_len > ready_len[index] + 1
            self._after[req.req_id] = []
            allowed[of_req] = NO_DRAFT if has_forced else self._follow(req, draft_ids[of_req].tolist())
        return allowed

    def _follow(self, req: InferReq, draft_ids: list[int]) -> list[int]:
        assert req.grammar is not None
        ahead, after = req.grammar.copy(), self._after[req.req_id]
        allowed: list[int] = []
        forced: list[int] = []
        while len(allowed) < len(draft_ids) and not ahead.is_unconstrained:
            forced = forced or ahead.forced()
            draft_id = forced.pop(0) if forced else draft_ids[len(allowed)]
            if not ahead.allows(draft_id):
                return allowed + [NO_DRAFT] * (len(draft_ids) - len(allowed))
            ahead.advance(draft_id)
            allowed.append(draft_id)
            after.append(ahead.copy())
        return allowed + draft_ids[len(allowed) :]
