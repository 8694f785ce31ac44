"""Commands about adapters with several engines: all obey, or all stay as they were, and new engines catch up."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.cluster.adapters import ClusterAdapters
from lightserve.cluster.engine import Engine
from lightserve.cluster.load_estimate import SharedRates
from lightserve.messages.output import AdapterCard, AdapterReply, RouterStats
from lightserve.messages.request import NOBODY, ListAdapters, LoadAdapter, UnloadAdapter
from lightserve.router.observability.stats import RouterMetrics

OK, REFUSED = AdapterReply(7), AdapterReply(7, 400, "rank 64 is too large")


class FakeLink:
    instance = "a router"

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    async def recv(self) -> Any:
        raise NotImplementedError

    def close(self) -> None: ...


def engines(count: int) -> list[Engine]:
    return [Engine(number, FakeLink(), SharedRates()) for number in range(count)]


def sent(engine: Engine) -> list[Any]:
    assert isinstance(engine.link, FakeLink)
    return engine.link.sent


def test_an_engine_that_joins_gets_what_operators_have_changed() -> None:
    all_engines = engines(2)
    adapters = ClusterAdapters(all_engines)
    adapters.joined(LoadAdapter(7, "a", "folder"), {0: OK, 1: OK})
    adapters.joined(UnloadAdapter(7, "b"), {0: OK, 1: AdapterReply(7, 404)})

    adapters.restore(all_engines[1])

    assert sent(all_engines[1]) == [
        LoadAdapter(NOBODY, "a", "folder", replaces=True, is_restored=True),
        UnloadAdapter(NOBODY, "b"),
    ]


@pytest.mark.parametrize("existed", [False, True])
def test_an_adapter_that_one_engine_refuses_is_taken_back_in_the_others(existed: bool) -> None:
    all_engines = engines(2)
    adapters = ClusterAdapters(all_engines)
    if existed:
        adapters.joined(LoadAdapter(6, "a", "old"), {0: OK, 1: OK})

    reply = adapters.joined(LoadAdapter(7, "a", "new", replaces=True), {0: OK, 1: REFUSED})

    assert (reply.status, reply.message) == (400, "engine 1: rank 64 is too large")
    old = LoadAdapter(NOBODY, "a", "old", replaces=True, is_restored=True)
    assert sent(all_engines[0]) == [old if existed else UnloadAdapter(NOBODY, "a")]
    assert sent(all_engines[1]) == []


def test_an_adapter_is_there_if_an_engine_has_it() -> None:
    adapters = ClusterAdapters(engines(2))
    missing = AdapterReply(7, 404, "no such adapter")

    assert adapters.joined(ListAdapters(7, "a"), {0: missing, 1: OK}).status == 200
    assert adapters.joined(ListAdapters(7, "a"), {0: missing, 1: missing}) == missing
    assert adapters.joined(ListAdapters(7), {}).status == 503
    cards = [AdapterReply(7, adapters=[AdapterCard("b", "b"), AdapterCard(name, name)]) for name in "ac"]
    listed = adapters.joined(ListAdapters(7), dict(enumerate(cards)))
    assert [card.name for card in listed.adapters] == ["b", "a", "c"]


def test_the_log_says_once_that_a_name_stands_for_other_files(caplog: pytest.LogCaptureFixture) -> None:
    all_engines = engines(3)
    adapters = ClusterAdapters(all_engines)
    for engine, digest in zip(all_engines, ("x", "x", "y"), strict=True):
        engine.stats = RouterStats(0.0, RouterMetrics().snapshot(), adapters={"a": digest})

    for engine in [*all_engines, *all_engines]:
        adapters.check_equal(engine)

    assert len([record for record in caplog.records if "has other files in engine" in record.message]) == 1
