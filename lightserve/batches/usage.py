"""The tokens of a batch: the sum of what the responses of its lines say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Usage(NamedTuple):
    input: int = 0
    cached: int = 0  # of the input
    output: int = 0
    reasoning: int = 0  # of the output

    def plus(self, usage: Usage) -> Usage:
        return Usage(*map(int.__add__, self, usage))


NO_USAGE = Usage()


def usage_of(response: Any) -> Usage:
    """Of a response of any endpoint: each API has its own names."""
    usage = _mapping(response, "usage")
    inputs = _mapping(usage, "prompt_tokens_details") or _mapping(usage, "input_tokens_details")
    outputs = _mapping(usage, "completion_tokens_details") or _mapping(usage, "output_tokens_details")
    apart = _count(usage, "cache_read_input_tokens")  # Anthropic's input_tokens are without these
    return Usage(
        _count(usage, "prompt_tokens", "input_tokens") + apart,
        _count(inputs, "cached_tokens") + apart,
        _count(usage, "completion_tokens", "output_tokens"),
        _count(outputs, "reasoning_tokens"),
    )


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    counts = value.get(name) if isinstance(value, Mapping) else None
    return counts if isinstance(counts, Mapping) else {}


def _count(counts: Mapping[str, Any], *names: str) -> int:
    """Under the first name that there is."""
    return next((int(counts[name]) for name in names if counts.get(name)), 0)
