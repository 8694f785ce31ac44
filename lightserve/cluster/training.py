"""What a trainer has asked of all engines: one that joins later does it too, and none serves with other weights.

An update that has replaced the weights of some engines only is an error, which names the others. These generate
nothing until they have the last weights: new ones load them if they come from a folder, or wait for the trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from msgspec.structs import replace

from lightserve.cluster.adapters import NO_ENGINE
from lightserve.cluster.engine import Engine
from lightserve.messages.request import NOBODY
from lightserve.messages.rl import (
    MEMORY_TAGS,
    TRAINER,
    BeginWeightUpdate,
    EndWeightUpdate,
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
    joined_replies,
)
from lightserve.messages.weights import WeightSelector
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

RESTORED = NOBODY - 1  # id of the queries to an engine that has joined
REPLACING = ReceiveWeights | EndWeightUpdate | LoadWeightsFrom  # of weights
UPDATES = JoinWeightGroup | BeginWeightUpdate | REPLACING
DIED = "it was lost before it replied"
COMPARED = "its weights are compared with those of the other engines"
LOADING = "it loads the last weights"
OLD_DRAFTS = "engine {} drafts with the weights of its files, others with those of an update; send them again"
OLD = "weights_lost: engine {} does not have the last weights{}; send all weights again"


class ClusterTraining:
    def __init__(self, engines: Iterable[Engine]) -> None:
        """``engines``: those that run now, whenever it is iterated."""
        self.is_enabled = False  # --enable_rl
        self._engines = engines
        self._pause: PauseGeneration | None = None
        self._released: set[str] = set()  # tags of memory
        self._version: str | None = None  # of the weights, if a trainer has named them
        self._updates = 0  # how often the weights of engines were replaced
        self._load: LoadWeightsFrom | None = None  # that gave the last weights; None: a trainer sent them
        self._draft_load: LoadWeightsFrom | None = None  # that gave what drafts its last weights
        self._held: dict[int, tuple[int, int]] = {}  # by engine: its last update, and its generation of weights then

    def on_asked(self, query: RlQuery) -> None:
        if isinstance(query, PauseGeneration | ResumeGeneration):
            self._pause = query if isinstance(query, PauseGeneration) else None
        elif isinstance(query, Sleep):
            self._released |= set(query.tags or MEMORY_TAGS)
        elif isinstance(query, WakeUp):
            self._released -= set(query.tags or MEMORY_TAGS)
            if self._released <= {"cuda_graph"}:
                self._released.clear()

    def set_updating(self, is_updating: bool) -> None:
        """Some engines may have new weights already, and others not yet: none computes prompts for another."""
        for engine in self._engines:
            engine.is_updating = is_updating

    def joined(self, query: RlQuery, replies: Mapping[int, RlReply], lost: Set[int] = frozenset()) -> RlReply:
        """The reply to the trainer. ``lost``: engines that did not reply."""
        replies = dict(sorted(replies.items()))
        if isinstance(query, REPLACING):
            self._settle_drafts(query, replies)
            if not _is_of_drafts(query):
                self._settle(query, replies)
        elif isinstance(query, SetWeightVersion) and any(reply.status == 200 for reply in replies.values()):
            self._version = query.version
        if isinstance(query, UPDATES):
            replies |= {number: RlReply(query.query_id, 503, DIED) for number in sorted(lost)}
        if not replies:
            return RlReply(query.query_id, 503, NO_ENGINE)
        if isinstance(query, GetWeights):
            have_drafts = any(reply.weights is not None and reply.weights.draft_source for reply in replies.values())
            replies = {number: self._with_problem(number, reply, have_drafts) for number, reply in replies.items()}
        return joined_replies(query.query_id, replies)

    def _settle_drafts(self, query: REPLACING, replies: Mapping[int, RlReply]) -> None:
        if any(reply.status == 200 for reply in replies.values()):
            if isinstance(query, LoadWeightsFrom) and _is_of_drafts(query):
                self._draft_load = replace(query, query_id=NOBODY, version=None)
            elif any(reply.weights is not None and reply.weights.draft_source == TRAINER for reply in replies.values()):
                self._draft_load = None

    def _settle(self, query: RlQuery, replies: Mapping[int, RlReply]) -> None:
        """Some engines may have new weights now. Others then have old ones."""
        changed = {
            number: weights
            for number, reply in replies.items()
            if reply.status == 200
            and (weights := reply.weights) is not None
            and weights.generation != self._held.get(number, (0, 0))[1]
        }
        if not changed:
            return
        self._updates += 1
        self._load = replace(query, query_id=RESTORED) if isinstance(query, LoadWeightsFrom) else None
        self._version = next(iter(changed.values())).version
        for engine in self._engines:
            if engine.number in changed:
                self._has_last(engine, changed[engine.number])
            else:
                reply = replies.get(engine.number)
                self._refuse(engine, "" if reply is None else f" ({reply.message})")

    def _has_last(self, engine: Engine, weights: WeightsState) -> None:
        self._held[engine.number] = self._updates, weights.generation
        engine.weights_problem = ""

    def _refuse(self, engine: Engine, reason: str = "") -> None:
        engine.weights_problem = OLD.format(engine.number, reason)
        logger.error("engine %d serves nothing: %s", engine.number, engine.weights_problem)

    def _with_problem(self, number: int, reply: RlReply, have_drafts: bool) -> RlReply:
        """``have_drafts``: some engines have got weights of drafts."""
        problem = next((engine.weights_problem for engine in self._engines if engine.number == number), "")
        weights = reply.weights
        if weights is None:
            return reply
        if problem:
            weights = replace(weights, problem=problem)
        if have_drafts and not weights.draft_source and not weights.draft_problem:
            weights = replace(weights, draft_problem=OLD_DRAFTS.format(number))
        return replace(reply, weights=weights)

    # engines that join

    def restore(self, engine: Engine) -> None:
        """The engine has joined. If it was only out of reach, it has the last weights."""
        if not self.is_enabled:
            return
        engine.weights_problem = COMPARED
        engine.link.send(GetWeights(RESTORED))

    def add_reply(self, number: int, reply: RlReply) -> None:
        """Of an engine that was asked by ``restore``."""
        engine = next((engine for engine in self._engines if engine.number == number), None)
        if engine is None or reply.query_id != RESTORED:
            return
        if reply.weights is None:
            self._refuse(engine, f" ({reply.message})")
        else:
            self._compare(engine, reply.weights)

    def _compare(self, engine: Engine, weights: WeightsState) -> None:
        is_loaded = engine.weights_problem == LOADING
        if weights.generation and not self._updates:
            self._adopt(engine, weights)
        if is_loaded or not self._updates or self._held.get(engine.number) == (self._updates, weights.generation):
            self._has_last(engine, weights)
            self._repeat_state(engine)
            return
        self._held[engine.number] = 0, weights.generation
        if self._load is not None:
            engine.weights_problem = LOADING
            engine.link.send(replace(self._load, version=self._version))
            return
        self._refuse(engine)
        self._repeat_state(engine)

    def _adopt(self, engine: Engine, weights: WeightsState) -> None:
        """A trainer had updated it before this gateway was started."""
        self._updates, self._version = 1, weights.version
        self._load = None if weights.source == TRAINER else LoadWeightsFrom(RESTORED, weights.source, weights.version)
        self._has_last(engine, weights)
        for joined in self._engines:
            if self._held.get(joined.number, (0, 0))[0] != self._updates:
                self.restore(joined)

    def _repeat_state(self, engine: Engine) -> None:
        """The state in which the other engines are."""
        if self._draft_load is not None:
            engine.link.send(self._draft_load)
        if self._version is not None and not engine.weights_problem:
            engine.link.send(SetWeightVersion(NOBODY, self._version))
        if self._pause is not None:
            engine.link.send(replace(self._pause, query_id=NOBODY))
        if self._released:
            engine.link.send(Sleep(NOBODY, mode="keep", tags=sorted(self._released)))


def _is_of_drafts(query: RlQuery) -> bool:
    """Whether it loads a folder that has no weights of the model."""
    return isinstance(query, LoadWeightsFrom) and query.selector is WeightSelector.DRAFT
