"""The engine's end of its links to gateways. For the router it is both inbox and outbox.

A session is one connection of one gateway, from its hello until it sends nothing for ``SILENT_TICKS`` or cannot be
reached. Then its requests are aborted: the gateway has given them to another engine, or is gone. A gateway that
connects again gets a new session, and no message of the old one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from lightserve.ipc.channel import MessageError, make_decoder
from lightserve.ipc.codec import encode
from lightserve.links.curve import MAX_MESSAGE_BYTES, AsyncSocket, RateLimitedLog, try_send
from lightserve.links.translation import (
    MAX_SESSIONS,
    engine_id,
    for_engine,
    for_gateways,
    for_other_clock,
    own_timelines,
)
from lightserve.messages.cluster import (
    LINK_PROTOCOL,
    DispatchedReq,
    EngineDraining,
    EngineHello,
    EngineToGateway,
    FromEngine,
    GatewayHello,
    GatewayToEngine,
    Heartbeat,
    LinkRefused,
    MovedReqs,
    ToEngine,
)
from lightserve.messages.media import FromEncoder
from lightserve.messages.output import BatchTokenIdOut, Timelines
from lightserve.messages.request import AbortReq, ReleaseParents
from lightserve.messages.step import ReqFailed
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

TICK_S = 0.25
HEARTBEAT_TICKS = 2
SILENT_TICKS = 8  # 2 s; ticks, because a process that was stopped counts none
MAX_PAST_SESSIONS = 64  # of a gateway whose timelines it may see


@dataclass(slots=True, eq=False)
class Session:
    number: int
    peer: bytes  # ZMQ's name of the connection
    gateway: str
    silent_ticks: int = 0
    requests: set[int] = field(default_factory=set)  # open ones, by the engine's ids
    parents: set[int] = field(default_factory=set)  # the same of open groups, until the gateway releases them


class EngineServer:
    def __init__(self, socket: AsyncSocket, hello: EngineHello) -> None:
        self.on_join: Callable[[], FromEngine | None] = lambda: None  # what a new gateway must know
        self._socket = socket
        self._hello = hello
        self._decode = make_decoder(GatewayToEngine)
        self._inbox: asyncio.Queue[ToEngine | FromEncoder] = asyncio.Queue()
        self._sessions: dict[int, Session] = {}
        self._by_peer: dict[bytes, Session] = {}
        self._numbers = itertools.count()
        self._is_draining = False
        self._past: dict[str, list[int]] = {}  # sessions of each gateway that is connected
        self._log = RateLimitedLog(logger)

    async def recv(self) -> ToEngine | FromEncoder:
        return await self._inbox.get()

    def put(self, message: FromEncoder) -> None:
        """Of a process of this engine."""
        self._inbox.put_nowait(message)

    def send(self, message: FromEngine) -> None:
        """Never blocks. What nobody waits for any more is dropped."""
        for number, gateway_message in for_gateways(message, self._sessions.keys()):
            session = self._sessions[number]
            if isinstance(gateway_message, BatchTokenIdOut):
                self._forget_ended(session, gateway_message)
            elif isinstance(gateway_message, Timelines):
                gateway_message = for_other_clock(own_timelines(gateway_message, set(self._past[session.gateway])))
            self._deliver(session, gateway_message)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read())
            tasks.create_task(self._watch())

    async def drain(self) -> None:
        """Ask the gateways for no more requests, and wait until those that are here have ended."""
        self._is_draining = True
        self.send(EngineDraining())
        while any(session.requests for session in self._sessions.values()):  # noqa: ASYNC110  they end in many places
            await asyncio.sleep(TICK_S)

    def close(self) -> None:
        self._socket.close(linger=0)

    # from gateways

    async def _read(self) -> None:
        while True:
            peer, *frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise MessageError(f"received {len(frames)} frames instead of one")
                self._handle(peer, self._decode(frames[0]))
            except (MessageError, ValueError) as error:
                self._refuse(peer, str(error))

    def _handle(self, peer: bytes, message: GatewayToEngine) -> None:
        if isinstance(message, GatewayHello):
            self._open(peer, message)
            return
        session = self._by_peer.get(peer)
        if session is None:  # it was silent for too long
            self._refuse(peer, "this engine does not know the connection any more; connect again")
            return
        session.silent_ticks = 0
        if not isinstance(message, Heartbeat):
            translated = for_engine(session.number, message)
            if isinstance(translated, DispatchedReq):
                if translated.request.req_id in session.requests:
                    raise MessageError("a request has an id that is in use")
                session.requests.add(translated.request.req_id)
                if translated.request.is_group_open:
                    session.parents.add(translated.request.req_id)
            elif isinstance(translated, AbortReq):
                session.requests.discard(translated.req_id)
            elif isinstance(translated, ReleaseParents):
                session.parents.difference_update(translated.req_ids)
            self._inbox.put_nowait(translated)

    def _open(self, peer: bytes, hello: GatewayHello) -> None:
        engine_hello = self._hello
        if hello.protocol != LINK_PROTOCOL:
            reason = f"the gateway speaks protocol {hello.protocol}, this engine {LINK_PROTOCOL}"
            self._refuse(peer, f"{reason}; install the same version of LightServe on both")
            return
        if hello.model_digest != engine_hello.model_digest:
            reason = (
                f"the gateway has another model ({hello.model_digest}) than this engine ({engine_hello.model_digest})"
            )
            self._refuse(peer, f"{reason}: config.json or tokenizer differ; use the same files on both")
            return
        if self._is_draining:
            self._refuse(peer, "this engine is about to end")
            return
        for old in [
            session for session in self._sessions.values() if session.gateway == hello.gateway or session.peer == peer
        ]:
            self._end(old, "connected again")
        number = next(
            candidate
            for candidate in (count % MAX_SESSIONS for count in self._numbers)
            if candidate not in self._sessions
        )
        session = self._sessions[number] = self._by_peer[peer] = Session(number, peer, hello.gateway)
        self._past[hello.gateway] = [*self._past.get(hello.gateway, []), number][-MAX_PAST_SESSIONS:]
        logger.info("gateway %s connected (session %d)", hello.gateway, number)
        first = self.on_join()
        for message in (engine_hello, *([] if first is None else [first])):
            self._deliver(session, message)

    def _refuse(self, peer: bytes, reason: str) -> None:
        self._log.warning(f"refused a message of a gateway: {reason}")
        session = self._by_peer.get(peer)
        if session is not None:
            self._end(session, "sent an invalid message")
        self._send(peer, encode(LinkRefused(reason)))

    # to gateways

    def _deliver(self, session: Session, message: EngineToGateway) -> None:
        raw = encode(message)
        if len(raw) > MAX_MESSAGE_BYTES and isinstance(message, BatchTokenIdOut) and message.outs:
            self._deliver_parts(session, message)
        elif not self._send(session.peer, raw):
            self._end(session, "cannot be reached")

    def _deliver_parts(self, session: Session, batch: BatchTokenIdOut) -> None:
        """Log-probabilities of long prompts do not fit into one message."""
        *others, last = batch.outs
        if others or encode(BatchTokenIdOut()) != encode(replace(batch, outs=[])):
            self._deliver(session, replace(batch, outs=others))
            self._deliver(session, BatchTokenIdOut([last]))
            return
        reason = f"prompt_logprobs take more than {MAX_MESSAGE_BYTES >> 20} MB; ask for fewer top log-probabilities"
        self._deliver(session, BatchTokenIdOut(failed=[ReqFailed(last.req_id, 413, reason)]))
        self._inbox.put_nowait(AbortReq(engine_id(session.number, last.req_id)))

    def _send(self, peer: bytes, raw: bytes) -> bool:
        """Whether the gateway can be reached."""
        return try_send(self._socket, [peer, raw])

    def _forget_ended(self, session: Session, batch: BatchTokenIdOut) -> None:
        ended = [out.req_id for out in batch.outs if out.finish_reason is not None]
        ended += (
            [failure.req_id for failure in batch.failed]
            + [embedding.req_id for embedding in batch.embeddings]
            + batch.aborted
        )
        session.requests.difference_update(map(partial(engine_id, session.number), ended))

    # time

    async def _watch(self) -> None:
        for tick in itertools.count():
            await asyncio.sleep(TICK_S)
            for session in list(self._sessions.values()):
                session.silent_ticks += 1
                if session.silent_ticks > SILENT_TICKS:
                    self._end(session, f"sent nothing for {SILENT_TICKS * TICK_S:g} s")
                elif tick % HEARTBEAT_TICKS == 0:
                    self._deliver(session, Heartbeat())

    def _end(self, session: Session, reason: str) -> None:
        if self._sessions.pop(session.number, None) is None:
            return
        del self._by_peer[session.peer]
        if session.requests:
            self._inbox.put_nowait(MovedReqs(sorted(session.requests)))
        if session.parents:
            self._inbox.put_nowait(ReleaseParents(sorted(session.parents)))
        logger.info("gateway %s %s: %d requests aborted", session.gateway, reason, len(session.requests))
        is_connected = any(remaining.gateway == session.gateway for remaining in self._sessions.values())
        if not is_connected and len(self._past) > MAX_PAST_SESSIONS:
            del self._past[session.gateway]
