"""Questions of an operator go to every engine, and their replies become one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from lightserve.cluster.adapters import NO_ENGINE, ClusterAdapters
from lightserve.cluster.engine import Engine
from lightserve.cluster.training import REPLACING, ClusterTraining
from lightserve.messages.output import AdapterReply, ProfileReply, QueryReply, RequestTimeline, Timelines
from lightserve.messages.request import AdapterQuery, GetTimelines, StartProfile, StopProfile
from lightserve.messages.rl import JoinWeightGroup, RlQuery, RlReply

Query = GetTimelines | StartProfile | StopProfile | AdapterQuery | RlQuery

TIMELINES_TIMEOUT_TICKS = 8  # then the reply is made of what has come; the HTTP process waits longer


@dataclass(slots=True)
class _OpenQuery:
    query: Query
    waiting: set[int]  # engines that have not replied
    replies: dict[int, QueryReply] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)  # engines that have left without a reply
    ticks: int = 0


class ClusterQueries:
    def __init__(self, engines: Iterable[Engine] = ()) -> None:
        """``engines``: those that run now, whenever it is iterated."""
        self._open: dict[int, _OpenQuery] = {}
        self.adapters = ClusterAdapters(engines)
        self.training = ClusterTraining(engines)

    def engine_joined(self, engine: Engine) -> None:
        """It gets what was changed in the others while they ran."""
        self.adapters.restore(engine)
        self.training.restore(engine)

    def ask(self, query: Query, engines: Iterable[Engine]) -> QueryReply | None:
        """Send a query to all engines. Returns the reply if there is no engine."""
        asked = list(engines)
        if isinstance(query, RlQuery):
            self.training.on_asked(query)
        for index, engine in enumerate(asked):
            engine.link.send(replace(query, engine=index) if isinstance(query, JoinWeightGroup) else query)
        opened = _OpenQuery(query, {engine.number for engine in asked})
        if not asked:
            return self._joined(opened)
        self._open[query.query_id] = opened
        self._note_updates()
        return None

    def add_reply(self, engine: int, reply: QueryReply) -> QueryReply | None:
        """The joined reply, if this was the last one."""
        opened = self._open.get(reply.query_id)
        if opened is None:
            if isinstance(reply, RlReply):
                self.training.add_reply(engine, reply)
            return None
        opened.replies[engine] = reply
        return self._close_if_complete(opened, engine)

    def engine_left(self, engine: int) -> list[QueryReply]:
        """Replies to the queries that waited for this engine only."""
        for opened in self._open.values():
            opened.lost |= opened.waiting & {engine}
        replies = [self._close_if_complete(opened, engine) for opened in list(self._open.values())]
        return [reply for reply in replies if reply is not None]

    def tick(self) -> list[QueryReply]:
        """Replies to queries that an engine has not answered in time."""
        late = []
        for opened in list(self._open.values()):
            opened.ticks += 1
            if isinstance(opened.query, GetTimelines) and opened.ticks > TIMELINES_TIMEOUT_TICKS:
                del self._open[opened.query.query_id]
                late.append(self._joined(opened))
        return late

    def _close_if_complete(self, opened: _OpenQuery, engine: int) -> QueryReply | None:
        opened.waiting.discard(engine)
        if opened.waiting:
            return None
        del self._open[opened.query.query_id]
        self._note_updates()
        return self._joined(opened)

    def _note_updates(self) -> None:
        self.training.set_updating(any(isinstance(opened.query, REPLACING) for opened in self._open.values()))

    def _joined(self, opened: _OpenQuery) -> QueryReply:
        query = opened.query
        if isinstance(query, AdapterQuery):
            replies = {number: reply for number, reply in opened.replies.items() if isinstance(reply, AdapterReply)}
            return self.adapters.joined(query, replies)
        if isinstance(query, RlQuery):
            of_engines = {number: reply for number, reply in opened.replies.items() if isinstance(reply, RlReply)}
            return self.training.joined(query, of_engines, opened.lost)
        return _joined(opened)


def _joined(opened: _OpenQuery) -> QueryReply:
    query, replies = opened.query, dict(sorted(opened.replies.items()))
    if isinstance(query, GetTimelines):
        timelines = [
            timeline for reply in replies.values() if isinstance(reply, Timelines) for timeline in reply.timelines
        ]
        return Timelines(query.query_id, joined_timelines(timelines)[: query.limit])
    profiles = {engine: reply for engine, reply in replies.items() if isinstance(reply, ProfileReply)}
    if not profiles:
        return ProfileReply(query.query_id, 503, NO_ENGINE)
    messages = [f"engine {engine}: {reply.message}" for engine, reply in profiles.items() if reply.message]
    return ProfileReply(
        query.query_id,
        max(reply.status for reply in profiles.values()),
        "; ".join(messages),
        ", ".join(reply.path for reply in profiles.values() if reply.path),
    )


def joined_timelines(timelines: Iterable[RequestTimeline]) -> list[RequestTimeline]:
    """Newest first. A request that was moved has a timeline in several engines: they become one."""
    by_req_id: dict[int, RequestTimeline] = {}
    for timeline in timelines:
        known = by_req_id.get(timeline.req_id)
        by_req_id[timeline.req_id] = timeline if known is None else _joined_timeline(timeline, known)
    return sorted(by_req_id.values(), key=lambda timeline: timeline.arrived_s, reverse=True)


def _joined_timeline(first: RequestTimeline, second: RequestTimeline) -> RequestTimeline:
    return RequestTimeline(
        first.request_id,
        first.req_id,
        min(first.arrived_s, second.arrived_s),
        max(first.prompt_tokens, second.prompt_tokens),  # a prefill engine has the first tokens only
        max(first.max_new_tokens, second.max_new_tokens),
        sorted((*first.events, *second.events), key=lambda event: event.at_s),
        first.events_left_out + second.events_left_out,
    )
