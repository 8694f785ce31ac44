"""Messages of one gateway in the ids of the engine, and messages of the engine in the ids of each gateway.

Several gateways use the same request ids. An engine adds the session, which is the connection to one gateway.

    of a gateway    HTTP process (bits 48 to 62)                        count (bits 0 to 47)
    of an engine    session (bits 48 to 62)    HTTP process (40 to 47)  count (bits 0 to 39)

Sessions are counted, so an id that was used in one is not used again in the next one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

import msgspec
import numpy as np

from lightserve.messages.cluster import (
    DispatchedReq,
    EngineDraining,
    FromEngine,
    KvCacheEvents,
    KvCancel,
    KvTransferTimeout,
    MovedReqs,
    RemotePrefillRequest,
    ToEngine,
)
from lightserve.messages.int_arrays import Int64Array, int64s
from lightserve.messages.output import BatchTokenIdOut, RequestTimeline, RouterStats, Timelines, WeightsReplaced
from lightserve.messages.request import HTTP_PROCESS_BITS, REQ_ID_BITS, AbortReq, ReleaseParents
from lightserve.messages.step import DraftColumns

COUNT_BITS = REQ_ID_BITS - HTTP_PROCESS_BITS
MAX_SESSIONS = 1 << 15  # then their numbers are used again
_COUNT_MASK = (1 << COUNT_BITS) - 1
_PROCESS_MASK = (1 << HTTP_PROCESS_BITS) - 1

replace = msgspec.structs.replace


def engine_id(session: int, gateway_id: int) -> int:
    process, count = gateway_id >> REQ_ID_BITS, gateway_id & ((1 << REQ_ID_BITS) - 1)
    if not (0 <= process <= _PROCESS_MASK and count <= _COUNT_MASK):
        raise ValueError(f"request id {gateway_id} is out of range")
    return session << REQ_ID_BITS | process << COUNT_BITS | count


def gateway_id(of_engine: int) -> int:
    return (of_engine >> COUNT_BITS & _PROCESS_MASK) << REQ_ID_BITS | of_engine & _COUNT_MASK


def gateway_ids(of_engine: Int64Array) -> Int64Array:
    return (of_engine >> COUNT_BITS & _PROCESS_MASK) << REQ_ID_BITS | of_engine & _COUNT_MASK


def session_of(of_engine: int) -> int:
    return of_engine >> REQ_ID_BITS


def for_engine(session: int, message: ToEngine) -> ToEngine:
    """Raises ValueError for an id that no gateway uses."""
    if isinstance(message, DispatchedReq):
        request = message.request
        ids = {"req_id": engine_id(session, request.req_id), "group": engine_id(session, request.group)}
        parent = None if request.parent is None else engine_id(session, request.parent)
        return replace(message, request=replace(request, **ids, parent=parent))
    if isinstance(message, AbortReq | KvCancel):
        return replace(message, req_id=engine_id(session, message.req_id))
    if isinstance(message, MovedReqs | ReleaseParents):
        return replace(message, req_ids=[engine_id(session, req_id) for req_id in message.req_ids])
    return replace(message, query_id=engine_id(session, message.query_id))


def for_gateways(message: FromEngine, sessions: Iterable[int]) -> list[tuple[int, FromEngine]]:
    """The messages for these sessions. The parts for other ones are dropped."""
    if isinstance(message, BatchTokenIdOut):
        return [(session, batch) for session, batch in _split(message).items() if session in sessions]
    if isinstance(message, RouterStats):
        return [(session, _stats_for(message, session)) for session in sessions]
    if isinstance(message, KvCacheEvents | EngineDraining):
        return [(session, message) for session in sessions]
    if isinstance(message, WeightsReplaced):
        return [(session, _versions_for(message, session)) for session in sessions]
    if isinstance(message, RemotePrefillRequest | KvTransferTimeout):
        session = session_of(message.req_id)
        return [(session, replace(message, req_id=gateway_id(message.req_id)))] if session in sessions else []
    session = session_of(message.query_id)
    if session not in sessions:
        return []
    return [(session, replace(message, query_id=gateway_id(message.query_id)))]


def _stats_for(stats: RouterStats, session: int) -> RouterStats:
    if not stats.crash_suspects:
        return stats
    return replace(
        stats, crash_suspects=[gateway_id(req_id) for req_id in stats.crash_suspects if session_of(req_id) == session]
    )


def _versions_for(message: WeightsReplaced, session: int) -> WeightsReplaced:
    reqs = [req for req in message.reqs if session_of(req.req_id) == session]
    return replace(message, reqs=[replace(req, req_id=gateway_id(req.req_id)) for req in reqs])


def _split(batch: BatchTokenIdOut) -> dict[int, BatchTokenIdOut]:
    by_session: dict[int, BatchTokenIdOut] = defaultdict(lambda: BatchTokenIdOut([], [], [], [], embeddings=[]))
    for out in batch.outs:
        by_session[session_of(out.req_id)].outs.append(replace(out, req_id=gateway_id(out.req_id)))
    for failure in batch.failed:
        by_session[session_of(failure.req_id)].failed.append(replace(failure, req_id=gateway_id(failure.req_id)))
    for req_id in batch.aborted:
        by_session[session_of(req_id)].aborted.append(gateway_id(req_id))
    for embedding in batch.embeddings:
        by_session[session_of(embedding.req_id)].embeddings.append(
            replace(embedding, req_id=gateway_id(embedding.req_id))
        )
    _split_drafts(batch.drafts, by_session)
    sessions = int64s(batch.plain.req_ids) >> REQ_ID_BITS
    for session in np.unique(sessions).tolist():
        plain = batch.plain.where(sessions == session)
        by_session[session] = replace(by_session[session], plain=replace(plain, req_ids=gateway_ids(plain.req_ids)))
    return by_session


def _split_drafts(drafts: DraftColumns, by_session: dict[int, BatchTokenIdOut]) -> None:
    sessions = int64s(drafts.req_ids) >> REQ_ID_BITS
    for session in np.unique(sessions).tolist():
        of_session = drafts.where(sessions == session)
        of_session = replace(of_session, req_ids=gateway_ids(of_session.req_ids))
        by_session[session] = replace(by_session[session], drafts=of_session)


def for_other_clock(timelines: Timelines) -> Timelines:
    """Moments as ages, or ages as moments: the monotonic clocks of two machines have nothing in common."""
    now_s = time.monotonic()
    return replace(timelines, timelines=[_for_other_clock(timeline, now_s) for timeline in timelines.timelines])


def _for_other_clock(timeline: RequestTimeline, now_s: float) -> RequestTimeline:
    events = [replace(event, at_s=now_s - event.at_s) for event in timeline.events]
    return replace(timeline, arrived_s=now_s - timeline.arrived_s, events=events)


def own_timelines(timelines: Timelines, sessions: set[int]) -> Timelines:
    """Those of a gateway: it had these sessions, one after the other."""
    selected = [timeline for timeline in timelines.timelines if session_of(timeline.req_id) in sessions]
    return replace(
        timelines, timelines=[replace(timeline, req_id=gateway_id(timeline.req_id)) for timeline in selected]
    )
