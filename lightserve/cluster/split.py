"""Which engines generate, which ones compute prompts for others, and for which requests. Pure, as routing.py.

A request first gets the engine that generates. If that is a decode engine, and much of the prompt is missing there, a
prefill engine computes it and sends its KV, or one of the role ``both``, which generates too. Every engine can generate
and compute prompts: if none of the right role is left, another one takes its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from lightserve.cluster.routing import EngineLoad, RoutedRequest, cost_s
from lightserve.utils.block_hash import BLOCK_TOKENS

MIN_TIMEOUT_S = 10.0  # of a ticket: death and silence of engines are noticed earlier by other means
MAX_TIMEOUT_S = 120.0
TIMEOUT_FACTOR = 4.0  # times the expected duration
APART_S = 60.0  # a prefill engine whose KV has not come gets no prompts of the same decode engine for so long
MAX_SLOWDOWN = 4.0  # a prefill engine that is so many times slower than the decode engine itself is not asked


class HasRole(Protocol):
    @property
    def role(self) -> str: ...


E = TypeVar("E", bound=HasRole)


def for_generation(engines: Sequence[E]) -> list[E]:
    """Of these engines, those that new requests go to: prefill engines only if there are no others."""
    return [engine for engine in engines if engine.role != "prefill"] or list(engines)


def for_prefill(engines: Sequence[E]) -> list[E]:
    """Of these engines, those that compute prompts for decode engines."""
    return [engine for engine in engines if engine.role in ("prefill", "both")]


def choose_prefill(
    request: RoutedRequest, decode: EngineLoad, prefills: Sequence[EngineLoad], min_tokens: int
) -> EngineLoad | None:
    """The engine that should compute the prompt; None: the decode engine itself.

    A short rest is computed beside other tokens in less time than its way takes.
    """
    if not prefills or request.prompt_len - request.cached_tokens.get(decode.engine, 0) < min_tokens:
        return None
    best = min(prefills, key=lambda load: (cost_s(request, load), load.open_requests, load.engine))
    return None if cost_s(request, best) > MAX_SLOWDOWN * cost_s(request, decode) + 1.0 else best


def rest_tokens(known_tokens: int) -> int:
    """What a decode engine computes of a prompt whose KV comes: the tokens after the last whole block."""
    return known_tokens - (known_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def timeout_s(request: RoutedRequest, prefill: EngineLoad) -> float:
    """How long the decode engine waits, once it has slots for the prompt."""
    return min(MIN_TIMEOUT_S + TIMEOUT_FACTOR * cost_s(request, prefill), MAX_TIMEOUT_S)
