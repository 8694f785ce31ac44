"""Engines over TCP: the same tokens whatever breaks, and nothing for strangers."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from lightserve.cluster.inflight_request import open_request
from lightserve.ipc.channel import make_decoder
from lightserve.ipc.codec import encode
from lightserve.links import engine_server, gateway_link
from lightserve.links.curve import MAX_MESSAGE_BYTES, RateLimitedLog, engine_socket
from lightserve.links.engine_server import EngineServer
from lightserve.links.engines_file import EnginesFile, write_engines_file
from lightserve.links.gateway_link import GatewayLink, LinkLostError
from lightserve.links.keys import GatewayKeys
from lightserve.links.translation import engine_id, for_other_clock, gateway_id, session_of
from lightserve.messages.cluster import LINK_PROTOCOL, DispatchedReq, EngineToGateway, GatewayHello, MovedReqs
from lightserve.messages.control import EngineInfo
from lightserve.messages.output import BatchTokenIdOut, RequestTimeline, TimelineEvent, Timelines, TokenIdOut
from lightserve.messages.params import FinishReason, GenerationParams, SchedulingParams
from lightserve.messages.request import REQ_ID_BITS, AbortReq, GenerateReq, GetTimelines, ReleaseParents
from lightserve.messages.step import PromptLogprobs, Token, TokenColumns
from test.cluster.local_cluster import POOL, LocalCluster
from test.cluster.tcp_cluster import DIGEST, TcpCluster, hello_of, ready_of, tcp_cluster
from test.cluster.test_dispatcher import LONG, tokens
from test.waiting import until

HELLO = GatewayHello(LINK_PROTOCOL, "a gateway", DIGEST)


def check(folder: Path, scenario: Callable[[TcpCluster], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with tcp_cluster(folder, **options) as cluster:
            await scenario(cluster)

    asyncio.run(run())


@contextmanager
def logged_to(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Our loggers do not propagate."""
    logger = logging.getLogger("lightserve")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


def num_engines(gateway: LocalCluster) -> int:
    return len(gateway.placement.serving())


async def gateway_with_two_engines(cluster: TcpCluster) -> LocalCluster:
    for number in range(2):
        cluster.start(number)
    gateway = await cluster.gateway()
    await until(lambda: num_engines(gateway) == 2)
    return gateway


def test_engines_join_whenever_they_start_and_requests_move_when_one_dies(tmp_path: Path) -> None:
    async def scenario(cluster: TcpCluster) -> None:
        gateway = await cluster.gateway()
        gateway.send(0, [5] * 200, 200, seed=1)
        cluster.start(1)
        await gateway.until(lambda: len(gateway.tokens[0]) > 3)
        assert cluster.ready == [ready_of()]
        cluster.start(0)
        await until(lambda: num_engines(gateway) == 2)
        gateway.send(1, [6], 200)

        cluster.kill(1)
        await gateway.until(lambda: gateway.has_ended(0, 1))

        assert gateway.tokens[0] == tokens(1, 200)
        assert len(gateway.tokens[1]) == 200
        cluster.start(1)
        await until(lambda: num_engines(gateway) == 2)
        assert not gateway.failed
        assert len(cluster.ready) == 1

    check(tmp_path, scenario)


def test_without_an_engine_a_request_waits_until_its_deadline_and_gets_503(tmp_path: Path) -> None:
    async def scenario(cluster: TcpCluster) -> None:
        gateway = await gateway_with_two_engines(cluster)
        gateway.send(0, [5], LONG, seed=1, scheduling=SchedulingParams(timeout_s=1.0))
        gateway.send(1, [5], 300, seed=2)
        await gateway.until(lambda: len(gateway.tokens[1]) > 3)

        cluster.kill(0)
        cluster.kill(1)
        await gateway.until(lambda: gateway.has_ended(0))

        assert (gateway.failed[0].status, gateway.failed[0].message) == (
            503,
            "no engine could take the request within its timeout of 1 s; retry later",
        )
        cluster.start(0)
        await gateway.until(lambda: gateway.has_ended(1))
        assert gateway.tokens[1] == tokens(2, 300)

    check(tmp_path, scenario)


def test_tokens_of_an_engine_that_was_silent_are_dropped_and_it_aborts_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that is split: each side sends, and hears nothing."""

    async def scenario(cluster: TcpCluster) -> None:
        gateway = await gateway_with_two_engines(cluster)
        gateway.send(0, [5], LONG, seed=1)
        await gateway.until(lambda: len(gateway.tokens[0]) > 3)
        placed = gateway.placement.engine_of(0)
        assert placed is not None
        old = cluster.engines[placed.number]

        async def deaf() -> Any:
            await asyncio.Event().wait()

        monkeypatch.setattr(old.link._socket, "recv_multipart", deaf, raising=False)
        monkeypatch.setattr(placed.link, "_next", deaf)
        old.tasks[1].cancel()  # the tasks that wait in the old functions
        old.tasks[1] = asyncio.create_task(old.link.run())
        placed.link._silent_ticks = engine_server.SILENT_TICKS  # type: ignore[attr-defined]

        await gateway.until(lambda: gateway.has_ended(0))

        assert gateway.tokens[0] == tokens(1, LONG)
        await until(lambda: old.pool.used == 0 and not old.link._sessions)

    check(tmp_path, scenario)


def test_an_engine_keeps_requests_of_two_gateways_apart(tmp_path: Path) -> None:
    async def scenario(cluster: TcpCluster) -> None:
        one, two = await gateway_with_two_engines(cluster), await cluster.gateway()
        await until(lambda: num_engines(two) == 2)
        for req_id in range(6):  # both use the same ids
            one.send(req_id, [5] * 70, 40, seed=req_id)
            two.send(req_id, [5] * 70, 200, seed=100 + req_id)
        two.inbox.send(AbortReq(5))
        await one.until(lambda: one.has_ended(*range(6)))
        await two.until(lambda: two.has_ended(*range(5)))

        assert [one.tokens[req_id] for req_id in range(6)] == [tokens(req_id, 40) for req_id in range(6)]
        assert [two.tokens[req_id] for req_id in range(5)] == [tokens(100 + req_id, 200) for req_id in range(5)]
        two.inbox.send(GetTimelines(7, None, 100))
        await two.until(lambda: bool(two.replies))
        (reply,) = two.replies
        assert isinstance(reply, Timelines)
        assert {timeline.req_id for timeline in reply.timelines} == set(range(6))
        now_s = asyncio.get_running_loop().time()
        assert all(0 <= now_s - timeline.arrived_s < 600 for timeline in reply.timelines)
        await until(lambda: all(engine.pool.used == 0 for engine in cluster.engines.values()))

    check(tmp_path, scenario)


def test_a_gateway_that_joins_later_knows_what_is_cached(tmp_path: Path) -> None:
    async def scenario(cluster: TcpCluster) -> None:
        one = await gateway_with_two_engines(cluster)
        one.send(0, [5] * 640, 2)
        await one.until(lambda: one.has_ended(0))

        two = await cluster.gateway()
        await until(lambda: num_engines(two) == 2)
        await until(lambda: any(two.placement.index.num_blocks(number) == 10 for number in range(2)))
        two.send(0, [5] * 640, 2)
        await two.until(lambda: two.has_ended(0))

        assert two.cached_tokens[0] == 639

    check(tmp_path, scenario)


def test_metrics_count_on_after_a_link_was_lost(tmp_path: Path) -> None:
    async def scenario(cluster: TcpCluster) -> None:
        gateway = await gateway_with_two_engines(cluster)

        def tokens_counted() -> float:
            return 0.0 if gateway.stats is None else gateway.stats.metrics.values["generation_tokens_total"]

        gateway.send(0, [5], 30)
        gateway.send(1, [6], 30)
        await gateway.until(lambda: gateway.has_ended(0, 1) and tokens_counted() == 60)
        before = list(gateway.placement)
        for engine in cluster.engines.values():
            engine.link._refuse(next(iter(engine.link._by_peer)), "a test ends this link")
        await until(lambda: num_engines(gateway) == 2 and not set(before) & set(gateway.placement))
        gateway.send(2, [5], 30)
        await gateway.until(lambda: gateway.has_ended(2) and tokens_counted() > 60)
        await gateway.until(lambda: tokens_counted() == 90)

    check(tmp_path, scenario)


def test_strangers_are_refused_and_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    public, secret = zmq.curve_keypair()

    async def scenario(cluster: TcpCluster) -> None:
        gateway = await gateway_with_two_engines(cluster)
        gateway.send(0, [5], LONG, seed=1)
        await gateway.until(lambda: len(gateway.tokens[0]) > 3)
        keys, address = cluster.gateway_keys, cluster.addresses[0]

        assert "does not accept this gateway's key" in await refusal(address, replace(keys, secret=secret))
        assert "has another key than engines.allowed" in await refusal(address, replace(keys, engines={"": public}))
        assert "no key for this address" in await refusal(address, replace(keys, engines={"tcp://b:1": public}))
        assert await answer_to_plain_zmq(address) is None
        for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 9 + b"\x7f" + b"\xff" * 100, os.urandom(4096)):
            await asyncio.to_thread(send_bytes, address, sent)

        await gateway.until(lambda: gateway.has_ended(0))
        assert gateway.tokens[0] == tokens(1, LONG)
        assert all(len(engine.link._sessions) == 1 for engine in cluster.engines.values())

    with logged_to(caplog):
        check(tmp_path, scenario)
    found = [record.getMessage() for record in caplog.records if "refused a connection" in record.getMessage()]
    assert len([one for one in found if "is not in gateways.allowed" in one]) == 1
    assert len([one for one in found if "no LightServe gateway" in one]) == 1


async def refusal(address: str, keys: GatewayKeys, hello: GatewayHello = HELLO) -> str:
    """Why a link cannot be opened."""
    link: GatewayLink | None = None
    try:
        link = GatewayLink(address, keys)
        await link.open(hello)
    except LinkLostError as error:
        return str(error)
    finally:
        if link is not None:
            link.close()
    return ""


async def answer_to_plain_zmq(address: str) -> bytes | None:
    client = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    client.connect(address)
    try:
        await client.send(encode(HELLO))
        async with asyncio.timeout(0.3):
            answer: bytes = await client.recv()
            return answer
    except TimeoutError:
        return None
    finally:
        client.close(linger=0)


def send_bytes(address: str, sent: bytes) -> None:
    host, _, port = address.removeprefix("tcp://").partition(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(sent)


def test_a_gateway_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    async def scenario(cluster: TcpCluster) -> None:
        cluster.start(0)
        place = cluster.addresses[0], cluster.gateway_keys

        found = f"the gateway speaks protocol 99, this engine {LINK_PROTOCOL}"
        assert found in await refusal(*place, GatewayHello(99, "a", DIGEST))
        assert "another model (other) than this engine (a model)" in await refusal(
            *place, GatewayHello(LINK_PROTOCOL, "a", "other")
        )
        assert await refusal(*place) == ""

    check(tmp_path, scenario)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"weights_digest": "others"}, "it has other weights (others) than the engine before (weights)"),
        ({"ready": EngineInfo(POOL, POOL // 2, 32_000, 1)}, "its longest request has 2,048 tokens"),
        ({"ready": ready_of(model="with long factors")}, "its positions have other angles"),
        ({"ready": EngineInfo(POOL, POOL, 100, 1)}, "its vocab_size is 100, that of the engine before 32000"),
        ({"engine_id": "engine-0"}, "it is the same engine as"),
        ({"protocol": 99}, "it accepted a gateway with another protocol or model"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_by_name(
    tmp_path: Path,
    changes: dict[str, Any],
    found: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(cluster: TcpCluster) -> None:
        cluster.start(0)
        gateway = await cluster.gateway()
        await until(lambda: num_engines(gateway) == 1)
        cluster.start(1, **changes)
        await until(lambda: found in caplog.text)
        assert num_engines(gateway) == 1

    # the line about an engine that is not there yet must not hide the other one
    monkeypatch.setattr("lightserve.links.curve.LOG_INTERVAL_S", 0.0)
    with logged_to(caplog):
        check(tmp_path, scenario)


def test_a_gateway_knows_which_engines_can_send_each_other_kv(tmp_path: Path) -> None:
    async def scenario(cluster: TcpCluster) -> None:
        cluster.start(0, role="prefill", kv_transport="sockets", ready=ready_of(tp=2))
        cluster.start(1, role="decode", kv_transport="sockets")
        gateway = await cluster.gateway()
        await until(lambda: num_engines(gateway) == 2)

        prefill, decode = gateway.placement
        assert decode.kv_exchange.difference(prefill.kv_exchange) == "--tp is 1 and 2"

    check(tmp_path, scenario)


def test_bad_messages_of_a_gateway_end_its_session_only(tmp_path: Path) -> None:
    request = GenerateReq(1 << REQ_ID_BITS | 5, [1, 2], GenerationParams.of(max_new_tokens=LONG), 0.0)
    bad = {
        b"\xc1": "not a valid message",
        encode(AbortReq(-1)): "out of range",
        encode(DispatchedReq(request, 0.0, b"")): "is in use",
    }

    async def scenario(cluster: TcpCluster) -> None:
        gateway = await gateway_with_two_engines(cluster)
        gateway.send(0, [5], LONG, seed=1)
        for raw, found in bad.items():
            link = GatewayLink(cluster.addresses[0], cluster.gateway_keys)
            await link.open(HELLO)
            link.send(DispatchedReq(request, 0.0, b""))
            await link._socket.send(raw)
            with pytest.raises(LinkLostError, match=found):
                await link.run()
            link.close()
        big = GatewayLink(cluster.addresses[0], cluster.gateway_keys)
        await big.open(HELLO)
        await big._socket.send(bytes(MAX_MESSAGE_BYTES + 1))
        with pytest.raises(LinkLostError, match="the connection was closed"):
            await big.run()
        big.close()

        await gateway.until(lambda: gateway.has_ended(0))
        assert gateway.tokens[0] == tokens(1, LONG)
        await until(lambda: len(cluster.engines[0].link._sessions) == 1 and cluster.engines[0].pool.used == 0)

    check(tmp_path, scenario)


def test_a_request_that_is_too_large_for_the_link_gets_413(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_link, "MAX_MESSAGE_BYTES", 2000)

    async def scenario(cluster: TcpCluster) -> None:
        gateway = await gateway_with_two_engines(cluster)
        gateway.send(0, [5] * 1000, 4)
        gateway.send(1, [5] * 10, 4)
        await gateway.until(lambda: gateway.has_ended(0, 1))

        assert gateway.failed[0].status == 413
        assert "engines take 2000" in gateway.failed[0].message
        assert len(gateway.tokens[1]) == 4

    check(tmp_path, scenario)


class RecordingSocket:
    """Takes what an engine sends."""

    def __init__(self) -> None:
        self.sent: list[BatchTokenIdOut] = []

    def send_multipart(self, frames: list[bytes], flags: int) -> asyncio.Future[None]:
        message = make_decoder(EngineToGateway)(frames[1])
        if isinstance(message, BatchTokenIdOut):
            self.sent.append(message)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


def test_results_that_are_too_large_for_the_link_are_divided_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_server, "MAX_MESSAGE_BYTES", 3000)
    small, large = (PromptLogprobs(bytes(size), b"", b"", b"") for size in (2000, 4000))
    outs = [TokenIdOut(one, Token(7, prompt_logprobs=found)) for one, found in enumerate((small, large, small))]

    async def scenario() -> None:
        sockets: Any = RecordingSocket()
        server = EngineServer(sockets, hello_of("engine", 0))
        server._handle(b"peer", HELLO)
        server.send(BatchTokenIdOut(outs, aborted=[9], plain=TokenColumns.of([(8, [1, 2])])))

        sent = [out.req_id for batch in sockets.sent for out in batch.outs]
        failed = [(failure.req_id, failure.status) for batch in sockets.sent for failure in batch.failed]
        assert sorted(sent) == [0, 2]
        assert failed == [(1, 413)]
        assert [batch.aborted for batch in sockets.sent if batch.aborted] == [[9]]
        plain = [(out.req_id, out.token.id) for batch in sockets.sent for out in batch.plain.outs()]
        assert plain == [(8, 1), (8, 2)]
        assert await server.recv() == AbortReq(1)  # the engine computes it no more

    asyncio.run(scenario())


def test_ids_of_sessions_do_not_meet() -> None:
    ids = [0, 5, 3 << REQ_ID_BITS, 255 << REQ_ID_BITS | 2**40 - 1]

    found = {engine_id(session, one): (session, one) for session in (0, 1, 2**15 - 1) for one in ids}

    assert len(found) == 3 * len(ids)
    assert all((session_of(one), gateway_id(one)) == expected for one, expected in found.items())
    assert max(found) < 2**63
    for wrong in (-1, 256 << REQ_ID_BITS, 2**40):
        with pytest.raises(ValueError, match="out of range"):
            engine_id(0, wrong)


def test_moments_of_another_machine_become_moments_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks of two machines have nothing in common."""
    event = TimelineEvent("queued", 1_000_001.0)
    sent = Timelines(7, [RequestTimeline("a", 0, 1_000_000.0, 3, 4, [event])])

    monkeypatch.setattr(time, "monotonic", lambda: 1_000_005.0)  # of the engine
    on_the_way = for_other_clock(sent)
    monkeypatch.setattr(time, "monotonic", lambda: 20.0)  # of the gateway
    (received,) = for_other_clock(on_the_way).timelines

    assert (received.arrived_s, received.events[0].at_s) == (15.0, 16.0)


def test_the_timeout_of_a_gateway_counts_in_its_engines() -> None:
    message = GenerateReq(1, [1], GenerationParams(), 0.0)
    own = GenerateReq(1, [1], GenerationParams(), 0.0, SchedulingParams(timeout_s=3.0))

    assert open_request(message, True, 9.0).message().request.scheduling.timeout_s == 9.0
    assert open_request(own, True, 9.0).message().request.scheduling.timeout_s == 3.0
    assert open_request(message, True, None).message().request.scheduling.timeout_s is None


def test_what_strangers_cause_is_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    log = RateLimitedLog(logging.getLogger("lightserve.test"))
    with logged_to(caplog):
        for second in range(130):
            now_s = 100.0 + second
            log.warning(f"at {second}")

    found = [record.getMessage() for record in caplog.records]
    more = " (59 further ones since the last line)"
    assert found == ["at 0", f"at 60{more}", f"at 120{more}"]


def test_requests_of_a_gateway_that_sends_nothing_any_more_are_aborted() -> None:
    request = DispatchedReq(GenerateReq(5, [1, 2], GenerationParams(), 0.0), 0.0, b"")
    beams = [
        DispatchedReq(GenerateReq(req_id, [1, 2], GenerationParams(), 0.0, is_group_open=True), 0.0, b"")
        for req_id in (6, 7)
    ]

    async def scenario() -> None:
        sockets: Any = RecordingSocket()
        server = EngineServer(sockets, hello_of("engine", 0))
        server._handle(b"peer", HELLO)
        for message in (request, *beams):
            server._handle(b"peer", message)
            assert isinstance(await server.recv(), DispatchedReq)
        server.send(BatchTokenIdOut([TokenIdOut(one, Token(7), finish_reason=FinishReason.LENGTH) for one in (6, 7)]))
        server._handle(b"peer", ReleaseParents([6]))
        assert await server.recv() == ReleaseParents([6])
        sockets.sent.clear()
        server._by_peer[b"peer"].silent_ticks = engine_server.SILENT_TICKS
        watching = asyncio.create_task(server._watch())

        assert await server.recv() == MovedReqs([5])
        assert await server.recv() == ReleaseParents([7])
        server.send(BatchTokenIdOut([TokenIdOut(5, Token(7))]))  # of a step that was in flight

        assert not sockets.sent
        watching.cancel()

    asyncio.run(scenario())


def test_a_link_without_heartbeats_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_link, "SILENT_TICKS", 1)

    async def scenario(cluster: TcpCluster) -> None:
        engine = engine_socket(cluster.addresses[0], cluster.engine_keys)
        link = GatewayLink(cluster.addresses[0], cluster.gateway_keys)
        opening = asyncio.create_task(link.open(HELLO))
        peer, _ = await engine.recv_multipart()
        await engine.send_multipart([peer, encode(hello_of("engine", 0))])
        await opening

        with pytest.raises(LinkLostError, match="no heartbeat for"):
            await link.run()

        link.close()
        engine.close(linger=0)

    check(tmp_path, scenario)


def test_an_engine_that_drains_finishes_its_requests_and_gets_no_new_ones(tmp_path: Path) -> None:
    async def scenario(cluster: TcpCluster) -> None:
        gateway = await gateway_with_two_engines(cluster)
        gateway.send(0, [5], LONG, seed=1)
        await gateway.until(lambda: len(gateway.tokens[0]) > 3)
        placed = gateway.placement.engine_of(0)
        assert placed is not None
        model = cluster.engines[placed.number].model
        model.may_run.clear()  # its request may not end before it drains

        draining = asyncio.create_task(cluster.engines[placed.number].link.drain())
        await until(lambda: placed.is_draining)
        for req_id in range(1, 4):
            gateway.send(req_id, [5], LONG, seed=req_id)
        await gateway.until(lambda: all(gateway.tokens[req_id] for req_id in range(4)))
        assert list(placed.requests) == [0]
        assert not draining.done()
        model.may_run.set()
        await gateway.until(lambda: gateway.has_ended(*range(4)))
        await draining

        assert [gateway.tokens[0], gateway.tokens[3]] == [tokens(1, LONG), tokens(3, LONG)]
        assert gateway.dispatcher.metrics.values["dp_requests_moved_total"] == 0
        reason = await refusal(cluster.addresses[placed.number], cluster.gateway_keys)
        assert reason == "this engine is about to end"

    check(tmp_path, scenario)


def test_a_request_of_an_engine_that_ends_before_it_is_drained_goes_on_elsewhere(tmp_path: Path) -> None:
    async def scenario(cluster: TcpCluster) -> None:
        gateway = await gateway_with_two_engines(cluster)
        gateway.send(0, [5], LONG, seed=1)
        await gateway.until(lambda: len(gateway.tokens[0]) > 3)
        placed = gateway.placement.engine_of(0)
        assert placed is not None

        draining = asyncio.create_task(cluster.engines[placed.number].link.drain())
        await until(lambda: placed.is_draining)
        cluster.kill(placed.number)
        draining.cancel()
        await gateway.until(lambda: gateway.has_ended(0))

        assert gateway.tokens[0] == tokens(1, LONG)
        assert gateway.dispatcher.metrics.values["dp_requests_moved_total"] == 1
        assert gateway.dispatcher.metrics.values["dp_engine_restarts_total"] == 0

    check(tmp_path, scenario)


def test_engines_come_and_go_with_the_lines_of_the_file(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "engines"

    async def scenario(cluster: TcpCluster) -> None:
        one, two = cluster.addresses
        write_engines_file(path, [])
        gateway = await cluster.gateway(addresses=EnginesFile(str(path)))
        for number in range(2):
            cluster.start(number)
        gateway.send(0, [5], LONG, seed=1)
        write_engines_file(path, [one])
        await gateway.until(lambda: len(gateway.tokens[0]) > 3)
        cluster.engines[0].model.may_run.clear()  # its request may not end before its engine leaves
        write_engines_file(path, [one, two])
        await until(lambda: num_engines(gateway) == 2)

        path.write_text(f"# engine one is replaced\n\n{two}\n")
        await until(lambda: len(gateway.placement.accepting()) == 1)
        for req_id in range(1, 4):
            gateway.send(req_id, [6], LONG, seed=req_id)
        await gateway.until(lambda: all(gateway.tokens[req_id] for req_id in range(4)))
        assert [gateway.placement.engine_of(req_id).number for req_id in range(4)] == [0, 1, 1, 1]  # type: ignore[union-attr]
        cluster.engines[0].model.may_run.set()
        await gateway.until(lambda: gateway.has_ended(*range(4)))
        assert gateway.tokens[0] == tokens(1, LONG)
        assert gateway.dispatcher.metrics.values["dp_requests_moved_total"] == 0
        await until(lambda: num_engines(gateway) == 1 and gateway.dispatcher.addresses == {1: two})

        path.write_text("an address\n")
        await until(lambda: "the engines stay as they are" in log.text)
        assert num_engines(gateway) == 1
        write_engines_file(path, [one, two])
        await until(lambda: num_engines(gateway) == 2)

    check(tmp_path / "keys", scenario)
