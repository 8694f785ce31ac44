"""Which engines there are, what they have cached, and which one gets a request."""

from __future__ import annotations

from collections.abc import Iterator

from lightserve.cluster.engine import Engine
from lightserve.cluster.link import EngineLink
from lightserve.cluster.measured_load import SharedRates
from lightserve.cluster.open_request import OpenRequest
from lightserve.cluster.prefix_index import PrefixIndex
from lightserve.cluster.rates import OutputLength
from lightserve.cluster.routing import Policy, RoutedRequest


class Placement:
    def __init__(self, policy: Policy) -> None:
        self.index = PrefixIndex()
        self.output_length = OutputLength()
        self._policy = policy
        self._rates = SharedRates()
        self._engines: dict[int, Engine] = {}
        self._engine_of: dict[int, Engine] = {}  # by req_id

    def __iter__(self) -> Iterator[Engine]:
        """The engines whose router runs."""
        return iter(self._engines.values())

    def join(self, number: int, link: EngineLink) -> Engine:
        self.index.add_engine(number)
        engine = self._engines[number] = Engine(number, link, self._rates)
        self._engines = dict(sorted(self._engines.items()))
        return engine

    def leave(self, number: int) -> Engine | None:
        """The router of an engine died. Its requests are still in ``requests`` of the engine that is returned."""
        self.index.remove_engine(number)
        return self._engines.pop(number, None)

    def engine_of(self, req_id: int) -> Engine | None:
        return self._engine_of.get(req_id)

    def get(self, number: int) -> Engine | None:
        return self._engines.get(number)

    def serving(self) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.is_serving]

    def accepting(self) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.takes_requests]

    def place(self, req: OpenRequest) -> bool:
        """Send the request to the best engine. Returns False if no engine can take it now."""
        excluded = req.refused_by | req.leaving
        engines = [engine for engine in self.accepting() if engine.number not in excluded]
        if not engines:
            return False
        cached = {engine.number: self.index.cached_tokens(engine.number, req.hashes) for engine in engines}
        number = self._policy.choose(self._routed(req, cached), [engine.load for engine in engines])
        engine = self._engines[number]
        self._engine_of[req.req_id] = engine
        self.index.presume(number, req.hashes)
        engine.add(req, cached[number])
        return True

    def remove(self, req: OpenRequest) -> None:
        """The request has ended, or leaves its engine."""
        engine = self._engine_of.pop(req.req_id, None)
        if engine is not None:
            engine.remove(req)
            self.index.end_presumption(engine.number, req.hashes)

    def _routed(self, req: OpenRequest, cached: dict[int, int]) -> RoutedRequest:
        expected = min(self.output_length.tokens, req.request.params.stopping.max_new_tokens)
        return RoutedRequest(
            req.known_tokens,
            max(expected - len(req.output_ids), 1.0),
            cached,
            req.request.scheduling.session,
            req.hashes[0] if req.hashes else 0,
        )
