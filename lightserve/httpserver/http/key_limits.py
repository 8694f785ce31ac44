"""Limits of API keys: requests in a minute, and requests at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from lightserve.errors import KeyLimitError
from lightserve.httpserver.http.key_usage import Column, KeyUsage
from lightserve.utils.key_spec import KeySpec

# they end work, so that a client that is at its limit can use them
ENDING = ("/cancel", "/abort_request")


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Of every key that has no other ones. None: there is no limit."""

    requests_per_minute: int | None = None
    concurrency: int | None = None


class KeyLimiter:
    """Counts the requests of keys, and refuses those beyond a limit. Admin keys have none."""

    def __init__(self, limits: KeyLimits | None = None, usage: KeyUsage | None = None) -> None:
        self._limits = limits or KeyLimits()
        self._specs: dict[bytes, KeySpec] = {}
        self.usage = usage or KeyUsage()

    def use(self, specs: Iterable[KeySpec]) -> None:
        """These keys are valid from now on. What was counted stays."""
        self._specs = {spec.digest: spec for spec in specs}

    @contextmanager
    def counted(self, digest: bytes, path: str) -> Iterator[None]:
        """A request with this key. Raises KeyLimitError."""
        spec = self._specs[digest]
        if not path.endswith(ENDING):
            self._check_concurrency(digest, spec)
            self._check_rate(digest, spec)
        self.usage.count_request(digest)
        try:
            yield
        finally:
            self.usage.add(digest, Column.RUNNING, -1)

    def _check_concurrency(self, digest: bytes, spec: KeySpec) -> None:
        limit = spec.concurrency or self._limits.concurrency
        if limit is None or (running := self.usage.total(digest, Column.RUNNING)) < limit:
            return
        self.usage.add(digest, Column.REFUSED_CONCURRENCY)
        flag = "" if spec.concurrency else " (--key_concurrency)"
        message = f"{running} requests of this API key are running; its limit is {limit}{flag}"
        raise KeyLimitError(f"{message}; send the next one when one has ended", retry_after_s=1)

    def _check_rate(self, digest: bytes, spec: KeySpec) -> None:
        limit = spec.requests_per_minute or self._limits.requests_per_minute
        if limit is None or not (wait_s := self.usage.take(digest, limit)):
            return
        self.usage.add(digest, Column.REFUSED_RATE)
        seconds = math.ceil(wait_s)
        flag = "" if spec.requests_per_minute else " (--key_requests_per_minute)"
        message = f"the limit of this API key is {limit} requests a minute{flag}"
        raise KeyLimitError(f"{message}; try again in {seconds} s", retry_after_s=seconds)

    def count_tokens(self, owner: str, prompt_tokens: int, output_tokens: int) -> None:
        """``owner``: see ApiKeys. Clients without a key, and admins, are not counted."""
        digest = bytes.fromhex(owner)
        if digest in self._specs:
            self.usage.add(digest, Column.PROMPT_TOKENS, prompt_tokens)
            self.usage.add(digest, Column.OUTPUT_TOKENS, output_tokens)

    def totals(self, owner: str | None) -> Mapping[str, dict[Column, int]]:
        """By label of a key. ``owner``: only its own; None: of all."""
        totals: dict[str, dict[Column, int]] = {}
        for digest, spec in self._specs.items():
            if owner is None or digest.hex() == owner:
                row = totals.setdefault(spec.label, dict.fromkeys(Column, 0))
                for column in Column:
                    row[column] += self.usage.total(digest, column)
        return totals
