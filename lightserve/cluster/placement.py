"""Which engines there are, what they have cached, and which one gets a request."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

from lightserve.cluster.disaggregation import (
    APART_S,
    SAME_SERVER,
    KvExchange,
    choose_prefill,
    for_generation,
    for_prefill,
    should_prefill_locally,
    timeout_s,
)
from lightserve.cluster.engine import Engine
from lightserve.cluster.inflight_request import InflightRequest
from lightserve.cluster.link import EngineLink
from lightserve.cluster.load_estimate import SharedRates
from lightserve.cluster.prefix_index import PrefixIndex
from lightserve.cluster.rates import OutputLength
from lightserve.cluster.routing import Policy, RoutedRequest
from lightserve.messages.cluster import KvTransferParams
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)


class Placement:
    def __init__(self, policy: Policy, min_remote_prefill_tokens: int = 1) -> None:
        self._min_remote_prefill_tokens = min_remote_prefill_tokens
        self.local_prefill_tokens = 0  # that decode engines compute because the queues of prefill engines are long
        self.index = PrefixIndex()
        self.output_length = OutputLength()
        self._policy = policy
        self._rates = SharedRates()
        self._engines: dict[int, Engine] = {}
        self._engine_of: dict[int, Engine] = {}  # by req_id
        self._apart_until_s: dict[tuple[int, int], float] = {}  # by decode and prefill engine

    def __iter__(self) -> Iterator[Engine]:
        """The engines whose router runs."""
        return iter(self._engines.values())

    def join(
        self, number: int, link: EngineLink, role: str = "normal", kv_exchange: KvExchange = SAME_SERVER
    ) -> Engine:
        self.index.add_engine(number)
        self._apart_until_s = {pair: until for pair, until in self._apart_until_s.items() if number not in pair}
        engine = self._engines[number] = Engine(number, link, self._rates, role, kv_exchange)
        self._engines = dict(sorted(self._engines.items()))
        self._log_unequal(engine)
        return engine

    def _log_unequal(self, joined: Engine) -> None:
        """Once: pairs of engines with roles that exchange no KV."""
        for decode, prefill in itertools.permutations(self._engines.values(), 2):
            if joined in (decode, prefill) and decode.role == "decode" and for_prefill([prefill]):
                difference = decode.kv_exchange.difference(prefill.kv_exchange)
                if difference is not None:
                    logger.warning(
                        "engine %d (decode) gets no KV from engine %d (%s), and computes prompts itself: %s",
                        decode.number,
                        prefill.number,
                        prefill.role,
                        difference,
                    )

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

    def place_request(self, req: InflightRequest) -> bool:
        """Send the request to the best engine. Returns False if no engine can take it now."""
        excluded = req.refused_by | req.leaving
        engines = for_generation([engine for engine in self.accepting() if engine.number not in excluded])
        if not engines:
            return False
        cached = self._cached(req, engines)
        number = self._policy.choose(self._routed(req, cached), [engine.load for engine in engines])
        engine = self._engines[number]
        self._engine_of[req.req_id] = engine
        req.kv_transfer_params = self._transfer_params(req, engine, cached[number])
        self.index.presume(number, req.hashes)
        engine.add(req, cached[number])
        return True

    def remove(self, req: InflightRequest) -> None:
        """The request has ended, or leaves its engine."""
        engine = self._engine_of.pop(req.req_id, None)
        if engine is not None:
            engine.remove(req)
            self.index.end_presumption(engine.number, req.hashes)

    def choose_prefill(self, req: InflightRequest, decode: Engine, cached: int) -> tuple[Engine, float] | None:
        """The engine that should compute the prompt for ``decode``, and how long that may take; None: itself."""
        if decode.role != "decode" or not req.may_prefill_remotely or decode.is_updating:
            return None  # during an update, the KV may be of other weights than those of ``decode``
        now_s = time.monotonic()
        engines = [
            engine
            for engine in for_prefill(self.accepting())
            if engine is not decode
            and engine.number not in req.leaving
            and engine.kv_exchange.fits(decode.kv_exchange)
            and self._apart_until_s.get((decode.number, engine.number), now_s) <= now_s
        ]
        routed = self._routed(req, self._cached(req, engines) | {decode.number: cached})
        routed.expected_output = 0.0
        best = choose_prefill(routed, decode.load, [engine.load for engine in engines], self._min_remote_prefill_tokens)
        if best is None:
            return None
        if should_prefill_locally(routed, decode.load, best):
            self.local_prefill_tokens += req.known_tokens - cached
            return None
        return self._engines[best.engine], timeout_s(routed, best)

    def keep_apart(self, decode: int, prefill: int) -> None:
        """No prompts of the one for the other for a while: KV does not come."""
        self._apart_until_s[decode, prefill] = time.monotonic() + APART_S

    def add_prefill(self, engine: Engine, job: InflightRequest) -> None:
        """Have this engine compute the prompt of a request that another one has."""
        cached = self.index.cached_tokens(engine.number, job.hashes)
        self.index.presume(engine.number, job.hashes)
        engine.add(job, cached)

    def remove_prefill(self, engine: Engine, job: InflightRequest) -> None:
        engine.remove(job)
        self.index.end_presumption(engine.number, job.hashes)

    def _transfer_params(self, req: InflightRequest, engine: Engine, cached: int) -> KvTransferParams | None:
        choice = self.choose_prefill(req, engine, cached)
        if choice is None:
            return None
        return KvTransferParams(random.getrandbits(63), choice[1], self._min_remote_prefill_tokens)

    def _cached(self, req: InflightRequest, engines: list[Engine]) -> dict[int, int]:
        return {engine.number: self.index.cached_tokens(engine.number, req.hashes) for engine in engines}

    def _routed(self, req: InflightRequest, cached: dict[int, int]) -> RoutedRequest:
        expected = min(self.output_length.tokens, req.request.params.stopping.max_new_tokens)
        return RoutedRequest(
            req.known_tokens,
            max(expected - len(req.output_ids), 1.0),
            cached,
            req.request.scheduling.session,
            req.hashes[0] if req.hashes else 0,
            req.adapter,
            {number for number, engine in self._engines.items() if engine.holds(req.adapter)} if req.adapter else (),
        )
