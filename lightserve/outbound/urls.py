"""URLs of clients. One strict parser reads each of them, and what it has read is what is dialled and sent."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote

from lightserve.errors import InvalidRequestError

MAX_LENGTH = 8192
PORTS = {"https": 443, "http": 80}
LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
# no user name before the host, no backslash, no space and no control character anywhere
URL = re.compile(
    rf"(?P<scheme>https?)://(?P<host>{LABEL}(?:\.{LABEL})*|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{{1,5}}))?"
    r"(?P<path>/[^\s\\?#\x00-\x20\x7f]*)?(?P<query>\?[^\s\\#\x00-\x20\x7f]*)?(?:#[^\s\x00-\x20\x7f]*)?",
    re.IGNORECASE,
)
SCHEME = re.compile(r"https?:", re.IGNORECASE)
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.IGNORECASE)  # a host with such a last label is an IPv4 address
SENT_AS_IT_IS = "".join(map(chr, range(0x21, 0x7F)))
REFUSED_FORM = (
    "its URL cannot be read; it must be https://host/path, without a user name, spaces and backslashes, and with other "
    "letters than ASCII's only in the path"
)


@dataclass(frozen=True, slots=True)
class OutboundUrl:
    scheme: str
    host: str  # a name or an address, in small letters; IPv6 without brackets
    port: int
    target: str  # path and query

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def has_usual_port(self) -> bool:
        return self.port == PORTS[self.scheme]


class RuleFlags(NamedTuple):
    """The flags of the rules, for errors."""

    domains: str
    private_hosts: str
    http: str


@dataclass(frozen=True, slots=True)
class UrlRules:
    """Which URLs may be dialled. The flags say more."""

    flags: RuleFlags
    allowed_domains: Sequence[str] = ()  # empty: all that are public
    private_hosts: Sequence[str] = ()  # these may have any address
    allows_http: bool = False
    listed: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "listed", (*self.allowed_domains, *self.private_hosts))

    def check(self, url: OutboundUrl) -> None:
        if url.scheme == "http" and not self.allows_http:
            raise InvalidRequestError(f"its URL begins with http:; use https: ({self.flags.http} allows both)")
        is_listed = _is_one_of(url.host, self.listed)
        if self.allowed_domains and not is_listed:
            raise InvalidRequestError(f"its host is not one of {self.flags.domains}")
        if not url.has_usual_port and not is_listed:
            raise InvalidRequestError(
                f"its URL has port {url.port}; only {PORTS[url.scheme]} is allowed, except for {self.flags.domains}"
            )

    def may_be_private(self, url: OutboundUrl) -> bool:
        return _is_one_of(url.host, self.private_hosts)


def is_fetched(url: str) -> bool:
    return SCHEME.match(url) is not None


def parse_url(text: str) -> OutboundUrl:
    if len(text) > MAX_LENGTH:
        raise InvalidRequestError(f"its URL has {len(text):,} characters; the limit is {MAX_LENGTH:,}")
    match = URL.fullmatch(text)
    if match is None:
        raise InvalidRequestError(REFUSED_FORM)
    scheme, port = match["scheme"].lower(), match["port"]
    number = PORTS[scheme] if port is None else int(port)
    if not 0 < number < 65536:
        raise InvalidRequestError(f"its URL has port {number}; a port is a number from 1 to 65535")
    target = (match["path"] or "/") + (match["query"] or "")
    return OutboundUrl(scheme, _host(match["host"].lower()), number, quote(target, safe=SENT_AS_IT_IS))


def redirected(url: OutboundUrl, location: str) -> OutboundUrl:
    """Where the header Location of an answer leads."""
    if is_fetched(location):
        return parse_url(location)
    if location.startswith("//"):
        return parse_url(f"{url.scheme}:{location}")
    origin, path = f"{url.scheme}://{url.host_header}", url.target.partition("?")[0]
    if location.startswith("/"):
        return parse_url(origin + location)
    if location.startswith("?"):
        return parse_url(origin + path + location)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", location):
        raise InvalidRequestError("its server redirects to something else than https:")
    return parse_url(f"{origin}{path[: path.rfind('/') + 1]}{location}")


def _host(text: str) -> str:
    """Addresses in their usual form only: other parsers take 0x7f.1 and 2130706433 for addresses too."""
    try:
        if text.startswith("["):
            return str(ipaddress.IPv6Address(text[1:-1]))
        if NUMBER.fullmatch(text.rpartition(".")[2]):
            return str(ipaddress.IPv4Address(text))
    except ValueError as error:
        raise InvalidRequestError(REFUSED_FORM) from error
    return text


def _is_one_of(host: str, names: Sequence[str]) -> bool:
    """A name is a host, or *.example.com for all below it."""
    return any(host == name or (name.startswith("*.") and host.endswith(name[1:])) for name in map(str.lower, names))
