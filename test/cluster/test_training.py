"""Trainers of several engines: none generates with other weights than the others, whatever breaks."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from lightserve.cluster.engine import Engine
from lightserve.cluster.queries import ClusterQueries
from lightserve.cluster.training import RESTORED
from lightserve.messages.request import NOBODY
from lightserve.messages.rl import (
    TRAINER,
    GetWeights,
    JoinWeightGroup,
    LoadWeightsFrom,
    PauseGeneration,
    ReceiveWeights,
    ResumeGeneration,
    RlQuery,
    RlReply,
    SetWeightVersion,
    Sleep,
    WakeUp,
    WeightsState,
)
from lightserve.messages.weights import WeightSelector
from test.cluster.test_adapters import engines, sent

FOLDER = LoadWeightsFrom(1, "step-2", "v2")
BROADCAST = ReceiveWeights(1, "trainer", [])
JOIN = JoinWeightGroup(1, "trainer", 1, 5, "gloo", 60.0)


class Cluster:
    def __init__(self, count: int = 2) -> None:
        self.engines = engines(count)
        self.queries = ClusterQueries(self.engines)
        self.queries.training.is_enabled = True

    def ask(self, query: RlQuery, *replies: RlReply | None) -> RlReply:
        """``replies``: of the engines; None: it dies."""
        assert self.queries.ask(query, self.engines) is None
        asked, joined = list(self.engines), None
        for engine, reply in zip(asked, replies, strict=True):
            if reply is None:
                self.engines.remove(engine)
                joined = next(iter(self.queries.engine_left(engine.number)), joined)
            else:
                joined = self.queries.add_reply(engine.number, reply) or joined
        assert isinstance(joined, RlReply)
        return joined

    def join(self, generation: int) -> Engine:
        """The second engine comes back."""
        self.engines.append(engine := engines(2)[1])
        self.queries.engine_joined(engine)
        assert [*sent(engine)] == [GetWeights(RESTORED)]
        assert not engine.is_serving
        self.reply(engine, generation)
        return engine

    def reply(self, engine: Engine, generation: int, source: str = "") -> None:
        self.queries.add_reply(engine.number, has(generation, source, query_id=RESTORED))


def has(generation: int, source: str = "", query_id: int = 1) -> RlReply:
    return RlReply(query_id, weights=WeightsState("v2", generation, source))


def refused(message: str = "not here") -> RlReply:
    return RlReply(1, 400, message)


def serving(cluster: Cluster) -> list[bool]:
    return [engine.is_serving for engine in cluster.engines]


def test_an_engine_that_refuses_an_update_of_the_others_is_named_and_generates_nothing() -> None:
    cluster = Cluster()

    reply = cluster.ask(FOLDER, has(1, "/step-2"), refused())

    assert (reply.status, reply.message) == (400, "engine 1: not here")
    assert serving(cluster) == [True, False]
    weights = cluster.ask(GetWeights(1), has(1), has(0)).weights
    assert weights is not None
    assert weights.problem == "weights_lost: engine 1 does not have the last weights (not here); send all weights again"
    assert cluster.ask(FOLDER, has(2, "/step-2"), has(1, "/step-2")).status == 200
    assert serving(cluster) == [True, True]


def test_an_update_that_all_engines_refuse_changes_nothing() -> None:
    cluster = Cluster()

    assert cluster.ask(FOLDER, refused(), refused()).status == 400
    assert serving(cluster) == [True, True]


def test_no_engine_computes_prompts_for_another_until_all_have_replied_to_an_update() -> None:
    cluster = Cluster()
    cluster.queries.ask(GetWeights(2), cluster.engines)
    assert not cluster.engines[0].is_updating

    cluster.queries.ask(FOLDER, cluster.engines)
    cluster.queries.add_reply(0, has(1))

    assert all(engine.is_updating for engine in cluster.engines)
    cluster.queries.add_reply(1, has(1))
    assert not any(engine.is_updating for engine in cluster.engines)


def test_a_part_of_an_update_changes_nothing() -> None:
    cluster = Cluster()

    assert cluster.ask(BROADCAST, has(0), has(0)).status == 200
    assert serving(cluster) == [True, True]


def test_an_engine_that_dies_during_an_update_is_named_and_loads_the_folder_when_it_is_back() -> None:
    cluster = Cluster()
    reply = cluster.ask(FOLDER, has(1, "/step-2"), None)
    assert (reply.status, reply.message) == (503, "engine 1: it was lost before it replied")

    engine = cluster.join(generation=0)

    assert sent(engine)[1:] == [LoadWeightsFrom(RESTORED, "step-2", "v2")]
    assert not engine.is_serving
    cluster.reply(engine, 1)
    assert engine.is_serving


def test_an_engine_that_comes_back_without_the_weights_of_a_trainer_generates_nothing() -> None:
    cluster = Cluster()
    cluster.ask(BROADCAST, has(1, TRAINER), has(1, TRAINER))
    cluster.engines.pop()
    cluster.queries.engine_left(1)

    engine = cluster.join(generation=0)

    assert "weights_lost" in engine.problem
    cluster.ask(BROADCAST, has(2, TRAINER), has(1, TRAINER))
    assert serving(cluster) == [True, True]


def test_an_engine_that_was_only_out_of_reach_goes_on() -> None:
    cluster = Cluster()
    cluster.ask(BROADCAST, has(1, TRAINER), has(1, TRAINER))
    cluster.engines.pop()

    assert cluster.join(generation=1).is_serving

    cluster.engines.pop()
    cluster.ask(BROADCAST, has(2, TRAINER))
    assert not cluster.join(generation=1).is_serving


def test_a_folder_that_an_engine_cannot_load_when_it_is_back_is_named() -> None:
    cluster = Cluster()
    cluster.ask(FOLDER, has(1), None)
    engine = cluster.join(generation=0)

    cluster.queries.add_reply(1, RlReply(RESTORED, 400, "no such folder"))

    assert engine.problem.endswith("(no such folder); send all weights again")


@pytest.mark.parametrize(("source", "is_refused"), [("/step-2", False), (TRAINER, True)])
def test_a_gateway_that_is_started_again_finds_engines_without_the_last_weights(source: str, is_refused: bool) -> None:
    cluster = Cluster()
    for engine in cluster.engines:
        cluster.queries.engine_joined(engine)
    first, second = cluster.engines
    cluster.reply(first, 0)
    assert first.is_serving

    cluster.reply(second, 3, source)

    assert serving(cluster) == [False, True]
    cluster.reply(first, 0)
    assert ("weights_lost" in first.problem) is is_refused
    assert (sent(first)[-1] == LoadWeightsFrom(RESTORED, source, "v2")) is not is_refused


def test_an_engine_that_joins_is_paused_asleep_and_has_the_name_of_the_weights() -> None:
    cluster = Cluster()
    pause, sleep = PauseGeneration(1, mode="keep"), Sleep(1, tags=["kv_cache"])
    for query in (pause, sleep, SetWeightVersion(1, "v7")):
        cluster.ask(query, RlReply(1), RlReply(1))
    cluster.engines.pop()

    engine = cluster.join(generation=0)

    repeated: list[Any] = [
        SetWeightVersion(NOBODY, "v7"),
        PauseGeneration(NOBODY, mode="keep"),
        Sleep(NOBODY, mode="keep", tags=["kv_cache"]),
    ]
    assert sent(engine)[1:] == repeated
    cluster.ask(ResumeGeneration(1), RlReply(1), RlReply(1))
    cluster.ask(WakeUp(1), RlReply(1), RlReply(1))
    cluster.engines.pop()
    assert sent(cluster.join(generation=0))[1:] == repeated[:1]


def test_the_ranks_of_engines_in_a_group_follow_one_another() -> None:
    cluster = Cluster(3)

    cluster.ask(JOIN, RlReply(1), RlReply(1), RlReply(1))

    assert [message.engine for engine in cluster.engines for message in sent(engine)] == [0, 1, 2]


DRAFTS = LoadWeightsFrom(1, "head-2", selector=WeightSelector.DRAFT)


def has_drafts(source: str, generation: int = 0) -> RlReply:
    return RlReply(1, weights=WeightsState("v2", generation, draft_source=source))


def test_an_engine_that_joins_loads_the_folder_of_the_drafts_too_and_serves_without_it() -> None:
    cluster = Cluster()
    cluster.ask(DRAFTS, has_drafts("/head-2"), has_drafts("/head-2"))
    cluster.engines.pop()
    cluster.queries.engine_left(1)

    engine = cluster.join(generation=0)

    assert engine.is_serving
    assert sent(engine)[1:] == [replace(DRAFTS, query_id=NOBODY)]
    weights = cluster.ask(GetWeights(1), has_drafts("/head-2"), has_drafts("")).weights
    assert weights is not None
    assert weights.problem == ""
    assert weights.draft_problem.startswith("engine 1 drafts with the weights of its files")
    assert cluster.ask(GetWeights(1), has_drafts("/head-2"), has_drafts("/head-2")).weights == WeightsState(
        "v2", draft_source="/head-2"
    )


def test_an_engine_that_joins_loads_no_folder_of_drafts_after_a_broadcast_of_them() -> None:
    cluster = Cluster()
    cluster.ask(DRAFTS, has_drafts("/head-2"), has_drafts("/head-2"))
    cluster.ask(BROADCAST, has_drafts(TRAINER), has_drafts(TRAINER))
    cluster.engines.pop()
    cluster.queries.engine_left(1)

    engine = cluster.join(generation=0)

    assert engine.is_serving
    assert len(sent(engine)) == 1
