"""Which engines generate, which ones compute prompts for others, and for which requests. Pure, as routing.py.

A request first gets the engine that generates. If that is a decode engine, and much of the prompt is missing there, a
prefill engine computes it and sends its KV, or one of the role ``both``, which generates too. Every engine can generate
and compute prompts: if none of the right role is left, another one takes its part. If the queues of the prefill engines
are long, the decode engine computes the prompt itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from msgspec.structs import asdict, replace

from lightserve.cluster.routing import EngineLoad, RoutedRequest, cost_s
from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.control import KvIdentity, can_divide_kv

MIN_TIMEOUT_S = 10.0  # of a transfer: death and silence of engines are noticed earlier by other means
MAX_TIMEOUT_S = 120.0
TIMEOUT_FACTOR = 4.0  # times the expected duration
APART_S = 60.0  # a prefill engine whose KV has not come gets no prompts of the same decode engine for so long
# A decode engine computes a prompt itself if it is done so much sooner than the prefill engines, and the time of the
# prompt sooner for each stream that it delays; of these, at most so many count. Simulated, one prefill and two decode
# servers, Llama-3-70B, prompts of 4,000 tokens, TTFT p99 s and ITL p99 ms at 0.8 and 1.9 times what the prefill server
# can do: 0.5 s and 2 streams 2.0 and 14, 3.4 and 42; 0 s and 3 streams 2.0 and 23, 3.3 and 42; 1 s and 3 streams 2.5
# and 13, 5.5 and 42.
PATIENCE_S = 0.5
MAX_DELAYED = 2
KV_FIELDS = {"tp": "--tp", "pp": "--pp", "is_deterministic": "--deterministic"}  # names of KvIdentity's in a log


class KvExchange(NamedTuple):
    """What engines must have in common to send each other KV."""

    identity: KvIdentity | None
    transport: str

    def fits(self, peer: KvExchange) -> bool:
        """Whether they can send each other KV."""
        return self == peer or (self._divides_heads(peer) and self._of_any_tp == peer._of_any_tp)

    def difference(self, peer: KvExchange) -> str | None:
        """Why they cannot: the first difference, in words; None: they can."""
        exchanges = (self._of_any_tp, peer._of_any_tp) if self._divides_heads(peer) else (self, peer)
        both = [{"--kv_transport": exchange.transport} | _named(exchange.identity) for exchange in exchanges]
        name = next((name for name in both[0] | both[1] if both[0].get(name) != both[1].get(name)), None)
        return None if name is None else f"{name} is {both[0].get(name)} and {both[1].get(name)}"

    def _divides_heads(self, peer: KvExchange) -> bool:
        first, second = self.identity, peer.identity
        if first is None or second is None or not (first.is_divisible and second.is_divisible):
            return False
        return can_divide_kv(first.tp, second.tp)

    @property
    def _of_any_tp(self) -> KvExchange:
        return self._replace(identity=None if self.identity is None else replace(self.identity, tp=0))


SAME_SERVER = KvExchange(None, "")  # engines of one server have the same flags


def _named(identity: KvIdentity | None) -> dict[str, object]:
    return {} if identity is None else {KV_FIELDS.get(name, name): value for name, value in asdict(identity).items()}


class RoledEngine(Protocol):
    @property
    def role(self) -> str: ...


E = TypeVar("E", bound=RoledEngine)


def for_generation(engines: Sequence[E]) -> list[E]:
    """Of these engines, those that new requests go to: prefill engines only if there are no others."""
    return [engine for engine in engines if engine.role != "prefill"] or list(engines)


def for_prefill(engines: Sequence[E]) -> list[E]:
    """Of these engines, those that compute prompts for decode engines."""
    return [engine for engine in engines if engine.role in ("prefill", "both")]


def choose_prefill(
    request: RoutedRequest, decode: EngineLoad, prefills: Sequence[EngineLoad], min_tokens: int
) -> EngineLoad | None:
    """The prefill engine that is done first; None: there is none, or little is missing on the decode engine.

    A short rest is computed beside other tokens in less time than its way takes.
    """
    if not prefills or _missing_tokens(request, decode) < min_tokens:
        return None
    return min(prefills, key=lambda load: (cost_s(request, load), load.open_requests, load.engine))


def should_prefill_locally(request: RoutedRequest, decode: EngineLoad, prefill: EngineLoad) -> bool:
    """Whether the decode engine should compute the prompt, because the prefill engine would be done much later."""
    if not prefill.waiting_tokens:  # it has no queue, and only a prompt shows whether it is still as slow as it was
        return False
    delay_s = _missing_tokens(request, decode) / decode.prefill_tokens_s  # of each stream that runs there
    most_s = cost_s(request, decode) + min(decode.running, MAX_DELAYED) * delay_s + PATIENCE_S
    return cost_s(request, prefill) > most_s


def rest_tokens(known_tokens: int) -> int:
    """What a decode engine computes of a prompt whose KV comes: the tokens after the last whole block."""
    return known_tokens - (known_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def timeout_s(request: RoutedRequest, prefill: EngineLoad) -> float:
    """How long the decode engine waits, once it has slots for the prompt."""
    return min(MIN_TIMEOUT_S + TIMEOUT_FACTOR * cost_s(request, prefill), MAX_TIMEOUT_S)


def _missing_tokens(request: RoutedRequest, decode: EngineLoad) -> int:
    return request.prompt_len - request.cached_tokens.get(decode.engine, 0)
