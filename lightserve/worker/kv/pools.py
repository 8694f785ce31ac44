"""How KV memory is divided if a model has layers with a sliding window.

One pool holds the KV of all tokens in the layers without a window. The windowed pool holds the KV of the last tokens of
each request in the layers with one, so it can be much smaller. Its size is a share of the other's: a request of
``length`` tokens needs ``kept`` windowed slots, so both pools are full at once if contexts have kept / share tokens on
average. A smaller share leaves more memory for long contexts, and less room for many short ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lightserve.common import ops
from lightserve.common.kv.layout import KvLayout
from lightserve.errors import ServerError
from lightserve.model_files.config.windowed_share import MIN_GAIN, windowed_share

ANY_NUMBER = 2**62


def tokens_in(num_bytes: int, bytes_per_token: int) -> int:
    """How many tokens fit; as many as can be counted if a token takes no bytes, in layers without attention."""
    return num_bytes // bytes_per_token if bytes_per_token else ANY_NUMBER


def _own_least(value: int) -> int:
    """Of a single rank."""
    return value


class KvSizes(NamedTuple):
    tokens: int  # in the pool of all tokens
    groups: tuple[int, ...] = ()  # tokens in the pool of each KV group that has one: of the layers with a window
    state_rows: int = 0  # of recurrent layers


def kept_tokens(window: int) -> int:
    """Windowed slots that a running request keeps between two steps.

    Its next token reads window - 1 of them; see WINDOW_MARGIN for the others. They also let a chat continue from some
    tokens before the end of an answer: the next prompt may write the end of an answer in other tokens.
    """
    return window - 1 + ops.WINDOW_MARGIN


@dataclass(frozen=True, slots=True)
class WindowedSizing:
    """For a layout with windows. ``wanted``: the operator's size of the windowed pool; 0: a single pool.

    All ranks of an engine get the same sizes, though a pipeline stage has its own layers and its own memory.
    """

    layout: KvLayout  # of the whole model
    max_len: int  # of a request
    step_tokens: int
    wanted: int | None = None
    own_layout: KvLayout | None = None  # of this rank's pipeline stage; None: of the whole model
    least: Callable[[int], int] = _own_least  # the smallest value of all ranks

    @property
    def retained_tokens(self) -> int:
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
        stage_layout = self.own_layout or self.layout
        single = KvSizes(min(self.least(tokens_in(budget, stage_layout.bytes_per_token)), max_tokens))
        windowed_bytes = stage_layout.windowed_bytes_per_token
        other_bytes = stage_layout.bytes_per_token - windowed_bytes
        if self.wanted == 0:
            return single
        if self.wanted is not None:
            most = tokens_in(max(budget - self.wanted * windowed_bytes, 0), other_bytes)
            if self.layout.bytes_per_token == self.layout.windowed_bytes_per_token:  # all layers have a window
                most = round(self.wanted / self._share)
            return self._checked(min(self.least(most), max_tokens), self.wanted)
        shared_bytes = other_bytes + windowed_bytes * self._share
        tokens = min(self.least(int(budget / shared_bytes) if shared_bytes else ANY_NUMBER), max_tokens)
        windowed = min(self.least(tokens_in(budget - tokens * other_bytes, windowed_bytes)), tokens)
        if windowed < self._smallest or tokens < MIN_GAIN * single.tokens:
            return single
        return KvSizes(tokens, (windowed,))

    @property
    def _share(self) -> float:
        return windowed_share(self.retained_tokens, self.max_len)

    @property
    def _smallest(self) -> int:
        """Room for one request and a step of a long prompt."""
        return self.retained_tokens + self.step_tokens

    def _saves_enough(self, share: float) -> bool:
        whole, windowed = self.layout.bytes_per_token, self.layout.windowed_bytes_per_token
        return MIN_GAIN * (whole - windowed + share * windowed) <= whole

    def _checked(self, tokens: int, windowed: int) -> KvSizes:
        if not windowed:
            return KvSizes(tokens)
        if not self.retained_tokens < windowed <= tokens:
            raise ServerError(
                f"max_windowed_token_num={windowed}: it must be above {self.retained_tokens}, what one request keeps, "
                f"and at most the {tokens} tokens of the KV pool; 0: one pool for all layers"
            )
        return KvSizes(tokens, (windowed,))
