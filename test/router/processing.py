"""Processing the result of a step as the router does, without messages."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lightserve.io_struct import Token, TokenOut
from lightserve.router.req import Req
from lightserve.router.scheduler import Scheduler


def process_tokens(scheduler: Scheduler, outs: Iterable[TokenOut]) -> list[Req]:
    """Complete the oldest step in flight, and give every token to its request. Returns the request of each token."""
    scheduler.complete_step()
    outs = list(outs)
    running = {req.req_id: req for req in scheduler._batch}
    req_ids = np.array([out.req_id for out in outs], dtype=np.int64)
    is_known = np.zeros(len(outs), dtype=np.bool_)
    if len(set(req_ids.tolist())) == len(outs):  # as in StepResult's columns
        is_plain = np.array([out == TokenOut(out.req_id, Token(out.token.id)) for out in outs], dtype=np.bool_)
        token_ids = np.array([out.token.id for out in outs], dtype=np.int32)
        is_known[is_plain] = scheduler.process_plain(req_ids[is_plain], token_ids[is_plain])
    processed = [
        running[out.req_id] if known else scheduler.process_token(out)
        for out, known in zip(outs, is_known.tolist(), strict=True)
    ]
    return [req for req in processed if req is not None]
