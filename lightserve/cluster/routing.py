"""Which engine gets a request. Pure: the dispatcher and the simulator call the same code.

A policy compares engines by what the request costs there, in seconds:

    tokens to compute / prefill rate  +  prompts before it / prefill rate  +  slower tokens because others run

No policy may choose an engine that has more than ``MAX_LOAD_FACTOR`` times the mean number of requests and more than
``MAX_EXCESS`` above it, while another has fewer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from lightserve.errors import OptionError

MAX_LOAD_FACTOR = 1.25  # of bounded-load consistent hashing: Mirrokni et al., 2016
# Requests above the mean that only the cost judges: so few do not overload an engine. Without it, each of 12 prefixes
# was soon computed by all of 3 engines: 12 to 48 clients had 92 % of one server's hits, and 97 to 99 % with it
# (simulated).
MAX_EXCESS = 8


@dataclass(slots=True)
class EngineLoad:
    """An engine that can take a request."""

    engine: int
    open_requests: int = 0
    waiting_tokens: int = 0  # of prompts that it has not computed, without those that it has cached or gets as KV
    running: int = 0  # requests that have a token and get more, or will as soon as the KV of their prompts is there
    prefill_tokens_s: float = 1.0  # measured
    decode_slowdown_s: float = 0.0  # measured: a token takes so much longer with each further running request


@dataclass(slots=True)
class RoutedRequest:
    prompt_len: int
    expected_output: float = 0.0  # tokens
    cached_tokens: dict[int, int] = field(default_factory=dict)  # of its prompt, by engine
    session: str = ""
    first_block: int = 0  # hash of its first block; 0: the prompt is shorter
    adapter: str = ""  # its LoRA adapter
    adapter_engines: Collection[int] = ()  # engines that hold it


class Policy(ABC):
    """Make a policy with ``make_policy``. It may keep state between requests."""

    def choose(self, request: RoutedRequest, engines: Sequence[EngineLoad]) -> int:
        """The engine that gets the request. ``engines`` has at least one, in the order of their numbers."""
        return self._choose(request, _with_adapter(request, within_bound(engines)))

    @abstractmethod
    def _choose(self, request: RoutedRequest, engines: Sequence[EngineLoad]) -> int:
        """``engines`` are within the bound."""


class RoundRobin(Policy):
    """One engine after the other."""

    def __init__(self) -> None:
        self._last = -1

    def _choose(self, request: RoutedRequest, engines: Sequence[EngineLoad]) -> int:
        numbers = [load.engine for load in engines]
        self._last = min((number for number in numbers if number > self._last), default=numbers[0])
        return self._last


class LeastLoaded(Policy):
    """The engine with the least work, whatever it has cached. Equal ones take turns."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def _choose(self, request: RoutedRequest, engines: Sequence[EngineLoad]) -> int:
        costs = [(_wait_s(load) + _decode_s(request, load), load.open_requests) for load in engines]
        least = min(costs)
        return self._turns._choose(request, [load for load, cost in zip(engines, costs, strict=True) if cost == least])


class Session(Policy):
    """Requests of a session go to the same engine. Others go where the load is least."""

    def __init__(self) -> None:
        self._without_session = LeastLoaded()

    def _choose(self, request: RoutedRequest, engines: Sequence[EngineLoad]) -> int:
        if not request.session:
            return self._without_session._choose(request, engines)
        return max(engines, key=lambda load: _hash_rank(request.session, load.engine)).engine


class Prefix(Policy):
    """The engine where the first token comes soonest: it has the prompt cached, or little else to do."""

    def __init__(self) -> None:
        self._short_prompts = LeastLoaded()

    def _choose(self, request: RoutedRequest, engines: Sequence[EngineLoad]) -> int:
        if not request.first_block:
            return self._short_prompts._choose(request, engines)
        # Equal engines: those that begin with the same block meet in one engine, however many dispatchers there are.
        return min(
            engines,
            key=lambda load: (
                cost_s(request, load),
                load.open_requests,
                -_hash_rank(str(request.first_block), load.engine),
            ),
        ).engine


POLICIES: dict[str, type[Policy]] = {
    "prefix": Prefix,
    "least_loaded": LeastLoaded,
    "session": Session,
    "round_robin": RoundRobin,
}
DEFAULT_POLICY = "prefix"


def make_policy(name: str) -> Policy:
    if name not in POLICIES:
        raise OptionError(f"cluster_policy={name!r}: must be one of {', '.join(POLICIES)}")
    return POLICIES[name]()


def cost_s(request: RoutedRequest, load: EngineLoad) -> float:
    """Seconds until the request ends there, without what is the same on all engines."""
    tokens = max(request.prompt_len - request.cached_tokens.get(load.engine, 0), 1)
    return tokens / load.prefill_tokens_s + _wait_s(load) + _decode_s(request, load)


def within_bound(engines: Sequence[EngineLoad]) -> list[EngineLoad]:
    """The engines that may get one more request. There is always one: an engine with no more than the mean."""
    total = sum(load.open_requests for load in engines) + 1
    most = max(math.ceil(MAX_LOAD_FACTOR * total / len(engines)), total // len(engines) + MAX_EXCESS)
    return [load for load in engines if load.open_requests < most]


def _with_adapter(request: RoutedRequest, engines: Sequence[EngineLoad]) -> Sequence[EngineLoad]:
    """Those that hold the adapter of the request. If none does, always the same one loads it."""
    if not request.adapter:
        return engines
    holding = [load for load in engines if load.engine in request.adapter_engines]
    return holding or [max(engines, key=lambda load: _hash_rank(request.adapter, load.engine))]


def _wait_s(load: EngineLoad) -> float:
    return load.waiting_tokens / load.prefill_tokens_s


def _decode_s(request: RoutedRequest, load: EngineLoad) -> float:
    return request.expected_output * load.running * load.decode_slowdown_s


def _hash_rank(key: str, engine: int) -> int:
    """Rendezvous hashing: if an engine leaves, only its own keys move."""
    return int.from_bytes(blake2b(f"{engine} {key}".encode(), digest_size=8).digest())
