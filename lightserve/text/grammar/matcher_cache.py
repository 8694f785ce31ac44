"""The compiled grammars that were used last, within a limit of memory."""

from __future__ import annotations

import threading
from collections import OrderedDict

from llguidance import LLMatcher

from lightserve.messages.params import GrammarSpec


class MatcherCache:
    """Any thread may use it."""

    def __init__(self, max_mib: int) -> None:
        """``max_mib`` counts what the grammars took when they were compiled. A lexer grows while it is used."""
        self._max_mib = max_mib
        self._used_mib = 0
        self._matchers: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, spec: GrammarSpec) -> LLMatcher | None:
        """A copy in the start state."""
        with self._lock:
            if spec not in self._matchers:
                return None
            self._matchers.move_to_end(spec)
            return self._matchers[spec].deep_copy()

    def add(self, spec: GrammarSpec, matcher: LLMatcher) -> None:
        with self._lock:
            self._remove(spec)
            self._matchers[spec] = matcher
            self._used_mib += spec.memory_mib
            while self._used_mib > self._max_mib:
                self._remove(next(iter(self._matchers)))

    def discard(self, spec: GrammarSpec) -> None:
        with self._lock:
            self._remove(spec)

    def clear(self) -> None:
        with self._lock:
            self._matchers.clear()
            self._used_mib = 0

    def _remove(self, spec: GrammarSpec) -> None:
        if self._matchers.pop(spec, None) is not None:
            self._used_mib -= spec.memory_mib
