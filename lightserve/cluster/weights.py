"""Weights that a trainer has changed: an engine that joins later has those of its files, and must get the new ones.

It serves nothing until then, so no text is made with weights of before. Weights of a folder are loaded again; those
that a trainer has broadcast are gone, so the engine waits for the next update.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightserve.cluster.engine import Engine
from lightserve.messages.request import NOBODY
from lightserve.messages.rl import (
    TRAINER,
    EndWeightUpdate,
    GetWeights,
    LoadWeightsFrom,
    ReceiveWeights,
    RlQuery,
    RlReply,
    WeightsState,
)
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

UPDATES = (ReceiveWeights, EndWeightUpdate, LoadWeightsFrom)


class ClusterWeights:
    def __init__(self, engines: Iterable[Engine]) -> None:
        """``engines``: those that run now, whenever it is iterated."""
        self._engines = engines
        self._served: WeightsState | None = None  # None: no trainer has changed them
        self._of: dict[int, WeightsState] = {}  # of each engine, after the last update

    def restore(self, engine: Engine) -> None:
        """The engine has joined. It may be one whose connection was lost, and have the weights that are served."""
        if self._served is not None:
            engine.has_old_weights = True
            engine.link.send(GetWeights(NOBODY))

    def observe(self, number: int, reply: RlReply, query: RlQuery | None) -> None:
        """``query``: of a client; None: it was asked here."""
        engine = next((engine for engine in self._engines if engine.number == number), None)
        weights = reply.weights
        if engine is None:
            return
        if query is None and engine.has_old_weights:
            self._compare(engine, reply)
        if weights is None or not weights.generation or weights.problem:
            return
        if isinstance(query, UPDATES):
            engine.has_old_weights = False
            joined = {engine.number for engine in self._engines}
            self._of = {number: state for number, state in self._of.items() if number in joined}
        if not engine.has_old_weights:
            self._served = self._of[number] = weights

    def _compare(self, engine: Engine, reply: RlReply) -> None:
        """Whether it has the weights that are served; if not, it loads them if they are in a folder."""
        served, weights, known = self._served, reply.weights, self._of.get(engine.number)
        if served is None or (weights is None and reply.status == 200):
            return
        if weights is not None and (weights.version, weights.source) == (served.version, served.source):
            engine.has_old_weights = served.source == TRAINER and weights != known
        elif served.source != TRAINER and reply.status == 200:
            engine.link.send(LoadWeightsFrom(NOBODY, served.source, served.version))
            return
        if engine.has_old_weights:
            reason = reply.message or "they came from the trainer, who must send all weights again"
            logger.error("engine %d serves nothing: it lacks the weights of the others (%s)", engine.number, reason)
