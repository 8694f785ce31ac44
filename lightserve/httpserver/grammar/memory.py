"""The memory of large grammars of running requests, which the workers hold until the requests end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lightserve.errors import UnavailableError
from lightserve.messages.params import GrammarSpec

MAX_MIB = 256  # of all large grammars together; a small one, of 1 MiB or less, does not count


class GrammarMemory:
    """Requests with the same grammar share its memory."""

    def __init__(self) -> None:
        self._users: Counter[GrammarSpec] = Counter()

    def add(self, grammars: Iterable[GrammarSpec]) -> None:
        """Add the grammars of a request, or raise UnavailableError and add none."""
        new = Counter(spec for spec in grammars if spec.memory_mib > 1)
        used_mib = sum(spec.memory_mib for spec in self._users | new)
        if new and used_mib > MAX_MIB:
            raise UnavailableError(
                f"the grammars of running requests take {used_mib} MiB of memory; the limit is {MAX_MIB}; try again"
            )
        self._users += new

    def replace(self, before: Iterable[GrammarSpec], after: Iterable[GrammarSpec]) -> None:
        """A request goes on with other grammars."""
        self.remove(before)
        self.add(after)

    def remove(self, grammars: Iterable[GrammarSpec]) -> None:
        self._users -= Counter(spec for spec in grammars if spec.memory_mib > 1)
