"""Opens connections to addresses that were checked."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from lightserve.outbound.addresses import checked, look_up
from lightserve.outbound.urls import OutboundUrl, UrlRules

CONNECT_S = 3.0  # to each address
READ_BYTES = 65536
MAX_LOOK_UPS = 8  # a resolver that hangs holds its thread

LookUp = Callable[[str, int], list[str]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Resolver:
    """Looks a host up once, and returns its addresses only if all of them may be dialled."""

    def __init__(self, rules: UrlRules, look_up_host: LookUp = look_up) -> None:
        self._rules = rules
        self._look_up = look_up_host
        self._threads = ThreadPoolExecutor(MAX_LOOK_UPS, "outbound-dns")

    async def addresses_of(self, url: OutboundUrl) -> list[str]:
        loop = asyncio.get_running_loop()
        addresses = await loop.run_in_executor(self._threads, self._look_up, url.host, url.port)
        return checked(addresses, self._rules.may_be_private(url), self._rules.flags.private_hosts)


async def connect(url: OutboundUrl, addresses: Sequence[str], tls: ssl.SSLContext) -> Streams:
    """To the first address that accepts; the certificate must be that of the URL's host. Raises OSError."""
    options = {"ssl": tls, "server_hostname": url.host} if url.scheme == "https" else {}
    for address in addresses:
        try:
            async with asyncio.timeout(CONNECT_S):
                return await asyncio.open_connection(address, url.port, limit=READ_BYTES, **options)  # type: ignore[arg-type]
        except (OSError, TimeoutError):  # ssl.SSLError is an OSError
            continue
    raise ConnectionError("no address of the host accepts connections")
