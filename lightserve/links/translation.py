"""Messages of one gateway in the ids of the engine, and messages of the engine in the ids of each gateway."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

import msgspec
import numpy as np

from lightserve.links.request_ids import engine_id, gateway_id, gateway_ids, session_of
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
from lightserve.messages.int_arrays import int64s
from lightserve.messages.output import BatchTokenIdOut, RequestTimeline, RouterStats, Timelines
from lightserve.messages.request import REQ_ID_BITS, AbortReq, ReleaseParents

replace = msgspec.structs.replace


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
        return replace(message, req_ids=[engine_id(session, one) for one in message.req_ids])
    return replace(message, query_id=engine_id(session, message.query_id))


def for_gateways(message: FromEngine, sessions: Iterable[int]) -> list[tuple[int, FromEngine]]:
    """The messages for these sessions. The parts for other ones are dropped."""
    if isinstance(message, BatchTokenIdOut):
        return [(session, part) for session, part in _split(message).items() if session in sessions]
    if isinstance(message, RouterStats):
        return [(session, _stats_for(message, session)) for session in sessions]
    if isinstance(message, KvCacheEvents | EngineDraining):
        return [(session, message) for session in sessions]
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
        stats, crash_suspects=[gateway_id(one) for one in stats.crash_suspects if session_of(one) == session]
    )


def _split(batch: BatchTokenIdOut) -> dict[int, BatchTokenIdOut]:
    found: dict[int, BatchTokenIdOut] = defaultdict(lambda: BatchTokenIdOut([], [], [], [], embeddings=[]))
    for out in batch.outs:
        found[session_of(out.req_id)].outs.append(replace(out, req_id=gateway_id(out.req_id)))
    for failure in batch.failed:
        found[session_of(failure.req_id)].failed.append(replace(failure, req_id=gateway_id(failure.req_id)))
    for req_id in batch.aborted:
        found[session_of(req_id)].aborted.append(gateway_id(req_id))
    for embedding in batch.embeddings:
        found[session_of(embedding.req_id)].embeddings.append(replace(embedding, req_id=gateway_id(embedding.req_id)))
    sessions = int64s(batch.plain.req_ids) >> REQ_ID_BITS
    for session in np.unique(sessions).tolist():
        own = batch.plain.where(sessions == session)
        found[session] = replace(found[session], plain=replace(own, req_ids=gateway_ids(own.req_ids)))
    return found


def for_other_clock(timelines: Timelines) -> Timelines:
    """Moments as ages, or ages as moments: the monotonic clocks of two machines have nothing in common."""
    now_s = time.monotonic()
    return replace(timelines, timelines=[_for_other_clock(one, now_s) for one in timelines.timelines])


def _for_other_clock(timeline: RequestTimeline, now_s: float) -> RequestTimeline:
    events = [replace(event, at_s=now_s - event.at_s) for event in timeline.events]
    return replace(timeline, arrived_s=now_s - timeline.arrived_s, events=events)


def own_timelines(timelines: Timelines, sessions: set[int]) -> Timelines:
    """Those of a gateway: it had these sessions, one after the other."""
    own = [one for one in timelines.timelines if session_of(one.req_id) in sessions]
    return replace(timelines, timelines=[replace(one, req_id=gateway_id(one.req_id)) for one in own])
