"""Fetches images within limits of time, size and connections."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cached_property

from lightserve.errors import InvalidRequestError, OverloadedError
from lightserve.media.fetch.exchange import Answer, get
from lightserve.outbound.addresses import look_up
from lightserve.outbound.dial import LookUp, Resolver
from lightserve.outbound.urls import OutboundUrl, RuleFlags, UrlRules, parse_url, redirected

MAX_REDIRECTS = 3
MAX_CONNECTIONS = 32  # of a process
MAX_PER_HOST = 8
MEDIA_FLAGS = RuleFlags("--allowed_media_domains", "--media_private_hosts", "--allow_http_media")


class Fetcher:
    """Of an HTTP process. Nothing is kept between two fetches: no cookie, no connection and no answer."""

    def __init__(
        self, rules: UrlRules, max_bytes: int, timeout_s: float = 10.0, look_up_host: LookUp = look_up
    ) -> None:
        self._rules = rules
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._resolver = Resolver(rules, look_up_host)
        self._connections = Counter[str]()  # by host
        self._is_free = asyncio.Condition()

    @cached_property
    def tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    async def fetch(self, text: str) -> bytes:
        url = parse_url(text)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._follow(url)
        except TimeoutError as error:
            raise InvalidRequestError(
                f"it did not arrive within {self._timeout_s:g} s (--media_timeout); send it as a data: URL"
            ) from error

    async def _follow(self, url: OutboundUrl) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._get(url)
            if not answer.location:
                return answer.data
            url = redirected(url, answer.location)
        raise InvalidRequestError(f"its server redirects more than {MAX_REDIRECTS} times")

    async def _get(self, url: OutboundUrl) -> Answer:
        self._rules.check(url)
        async with self._connection_to(url.host):
            return await get(url, await self._resolver.addresses_of(url), self._max_bytes, self.tls)

    @asynccontextmanager
    async def _connection_to(self, host: str) -> AsyncIterator[None]:
        await self._wait_for_connection(host)
        self._connections[host] += 1
        try:
            yield
        finally:
            self._connections[host] -= 1
            if not self._connections[host]:
                del self._connections[host]
            async with self._is_free:
                self._is_free.notify_all()

    async def _wait_for_connection(self, host: str) -> None:
        try:
            async with self._is_free, asyncio.timeout(self._timeout_s / 2):
                await self._is_free.wait_for(lambda: self._has_room(host))
        except TimeoutError as error:
            raise OverloadedError("too many images are fetched at the moment; try again later") from error

    def _has_room(self, host: str) -> bool:
        return self._connections[host] < MAX_PER_HOST and self._connections.total() < MAX_CONNECTIONS
