"""Processing the result of a step as the router does, without messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

import numpy as np

from lightserve.messages.int_arrays import int32s, int64s
from lightserve.messages.step import NO_DRAFTS, DraftColumns, Token, TokenColumns, TokenOut
from lightserve.router.req import Req
from lightserve.router.scheduler import Scheduler


class StepOuts(list[TokenOut]):
    """The tokens of a step, and what became of its drafts."""

    drafts: DraftColumns = NO_DRAFTS


def drafts_result(accepted: Mapping[int, int]) -> DraftColumns:
    """``accepted``: drafts by request."""
    counts = int32s(list(accepted.values()))
    return DraftColumns(int64s(list(accepted)), np.maximum(counts, 1), counts)


def process_tokens(scheduler: Scheduler, outs: Iterable[TokenOut], seconds: float | None = None) -> list[Req]:
    """Complete the oldest step in flight, and give every request its tokens. Returns the requests that got some.

    ``seconds``: how long the step took, if that is known.
    """
    scheduler.complete_step(seconds)
    if isinstance(outs, StepOuts):
        scheduler.process_drafts(outs.drafts)
    by_req = {req_id: list(own) for req_id, own in groupby(outs, key=lambda out: out.req_id)}
    plain = {req_id: own for req_id, own in by_req.items() if all(_is_plain(out) for out in own)}
    columns = TokenColumns.of([(req_id, [out.token.id for out in own]) for req_id, own in plain.items()])
    running = {req.req_id: req for group in scheduler.groups for req in group.batch}
    known = set(columns.req_ids[scheduler.process_plain(columns)].tolist())
    others = {req_id: scheduler.process_req(own) for req_id, own in by_req.items() if req_id not in known}
    reqs = [running[req_id] for req_id in by_req if req_id in known]
    return reqs + [tokens.req for tokens in others.values() if tokens is not None]


def _is_plain(out: TokenOut) -> bool:
    return out == TokenOut(out.req_id, Token(out.token.id))
