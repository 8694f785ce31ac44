"""How KV memory is divided if a model has layers with a sliding window.

One pool holds the KV of all tokens in the layers without a window. The windowed pool holds the KV of the last tokens of
each request in the layers with one, so it can be much smaller. Its size is a share of the other's: a request of
``length`` tokens needs ``kept`` windowed slots, so both pools are full at once if contexts have kept / share tokens on
average. A smaller share leaves more memory for long contexts, and less room for many short ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from lightserve.common import ops
from lightserve.common.kv.layout import KvLayout
from lightserve.errors import ServerError

MIN_SHARE = 1 / 8  # contexts of 8 windows: 4 k tokens with Gemma 3 1B, 8 k with Gemma 3 27B, 1.5 k with gpt-oss
LENGTHS_PER_CONTEXT = 4  # contexts are a quarter of the longest request or shorter
MIN_GAIN = 1.2  # a second pool must hold so many times the tokens of a single one


class KvSizes(NamedTuple):
    tokens: int  # in the pool of all tokens
    windowed: int | None = None  # tokens in the windowed pool; None: there is one pool


def kept_tokens(window: int) -> int:
    """Windowed slots that a running request keeps between two steps.

    Its next token reads window - 1 of them; see WINDOW_MARGIN for the others. They also let a chat continue from some
    tokens before the end of an answer: the next prompt may write the end of an answer in other tokens.
    """
    return window - 1 + ops.WINDOW_MARGIN


@dataclass(frozen=True, slots=True)
class WindowedSizing:
    """For a layout with windows. ``wanted``: the operator's size of the windowed pool; 0: a single pool."""

    layout: KvLayout
    max_len: int  # of a request
    step_tokens: int
    wanted: int | None = None

    @property
    def kept(self) -> int:
        return kept_tokens(self.layout.window or 1)

    def for_tokens(self, tokens: int) -> KvSizes:
        """The operator has set the size of the pool of all tokens."""
        windowed = self.wanted
        if windowed is None:
            windowed = max(math.ceil(tokens * self._share), self._smallest)
            if not self._saves_enough(windowed / tokens):
                return KvSizes(tokens)
        return self._checked(tokens, windowed)

    def for_budget(self, budget: int, max_tokens: int) -> KvSizes:
        """``budget``: bytes for KV; ``max_tokens``: the largest pool that is supported."""
        single = KvSizes(min(budget // self.layout.bytes_per_token, max_tokens))
        windowed_bytes = self.layout.windowed_bytes_per_token
        other_bytes = self.layout.bytes_per_token - windowed_bytes
        if self.wanted == 0:
            return single
        if self.wanted is not None:
            left = max(budget - self.wanted * windowed_bytes, 0)
            most = left // other_bytes if other_bytes else round(self.wanted / self._share)
            return self._checked(min(most, max_tokens), self.wanted)
        tokens = min(int(budget / (other_bytes + windowed_bytes * self._share)), max_tokens)
        windowed = min((budget - tokens * other_bytes) // windowed_bytes, tokens)
        if windowed < self._smallest or tokens < MIN_GAIN * single.tokens:
            return single
        return KvSizes(tokens, windowed)

    @property
    def _share(self) -> float:
        """Of the windowed pool, in tokens of the other pool."""
        return max(MIN_SHARE, LENGTHS_PER_CONTEXT * self.kept / self.max_len)

    @property
    def _smallest(self) -> int:
        """Room for one request and a step of a long prompt."""
        return self.kept + self.step_tokens

    def _saves_enough(self, share: float) -> bool:
        whole, windowed = self.layout.bytes_per_token, self.layout.windowed_bytes_per_token
        return MIN_GAIN * (whole - windowed + share * windowed) <= whole

    def _checked(self, tokens: int, windowed: int) -> KvSizes:
        if not windowed:
            return KvSizes(tokens)
        if not self.kept < windowed <= tokens:
            raise ServerError(
                f"max_windowed_token_num={windowed}: it must be above {self.kept}, what one request keeps, and at most "
                f"the {tokens} tokens of the KV pool; 0: one pool for all layers"
            )
        return KvSizes(tokens, windowed)
