"""What the rendering of a chat template may cost: steps, bytes of the values that it makes, and seconds.

Templates come with a model's files, so they may be hostile. What a template does in Python is counted as steps; what it
does in one C call is checked before (``need``) or cannot take more than what was paid for (``walk``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from jinja2.utils import Namespace

from lightserve.errors import TemplateLimitError

ITEM_BYTES = 64  # of an element of a list or dict: its slot and a small object
TEXT_FACTOR = 4  # a text inside a container is shown by its repr, which may have \x00 in place of a character
STEPS_PER_LOOK = 1024  # at the clock
NUMBERS = frozenset({int, float, bool, type(None)})
PLAIN = NUMBERS | {str}


class RenderLimits(NamedTuple):
    steps: int  # iterations of loops, calls and filters
    size: int  # bytes of all values that are made
    seconds: float = math.inf


# a thousand messages take some 10,000 steps and milliseconds; 16 MB of text, copied ten times, 160 MB
IN_THREAD = RenderLimits(steps=2**23, size=2**28, seconds=10.0)
ON_EVENT_LOOP = RenderLimits(steps=2**14, size=2**22)  # some 10 ms; a short chat takes 100 us


class RenderBudget:
    """What is left for one rendering."""

    __slots__ = ("_end_s", "_limits", "size", "steps")

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._end_s = time.monotonic() + limits.seconds
        self.steps = limits.steps
        self.size = limits.size

    def step(self, size: int = 0) -> bool:
        """Pay for a step that writes ``size`` bytes of the template's own text. True, for conditions."""
        self.steps -= 1
        if self.steps % STEPS_PER_LOOK == 0:
            self._look()
        if size > 0:
            self.spend(size)
        return True

    def _look(self) -> None:
        if self.steps <= 0:
            raise TemplateLimitError(f"more than {self._limits.steps:,} steps")
        if time.monotonic() > self._end_s:
            raise TemplateLimitError(f"longer than {self._limits.seconds:.0f} s")

    def spend(self, size: int) -> None:
        self.size -= size
        if self.size < 0:
            self.need(0)

    def need(self, size: int) -> None:
        """Check that so many bytes could be paid for."""
        if size > self.size:
            raise TemplateLimitError(f"more than {self._limits.size:,} bytes")

    def made(self, value: Any) -> Any:
        """Pay for a value that was made. What is in a container was paid for before."""
        kind = type(value)
        if kind is str:
            self.spend(value.__sizeof__())
        elif kind not in NUMBERS:
            self.spend(value.__sizeof__() if isinstance(value, str) else ITEM_BYTES * (1 + _length(value)))
        return value

    def text(self, value: Any) -> Any:
        """Pay for a value that becomes text."""
        return self.made(value) if type(value) is str else self.walk(value)

    def walk(self, value: Any) -> Any:
        """Pay for everything in a value, before a call that looks at all of it. A list may contain another one twice,
        so a short template can make a value that is exponentially long.
        """
        if type(value) in PLAIN:
            return value
        size, items = 0, [value]
        for item in items:  # it grows meanwhile
            kind = type(item)
            if kind is str:
                size += len(item)
            elif kind not in NUMBERS:
                items += self._contents(item)
        self.spend(TEXT_FACTOR * size)
        return value

    def _contents(self, value: Any) -> Iterable[Any]:
        """Pay for a container; what it contains."""
        if isinstance(value, dict | list | tuple):
            self.step(ITEM_BYTES * len(value))
            return chain(value, value.values()) if isinstance(value, dict) else value
        if isinstance(value, str):  # of a subclass
            return [str(value)]
        return [object.__getattribute__(value, "_Namespace__attrs")] if isinstance(value, Namespace) else ()

    def iterate(self, values: Any) -> Iterator[Any]:
        """The items of an iterable, each of which is a step."""
        for value in values:
            self.step(ITEM_BYTES)
            yield value


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple | dict) else 0
