"""The addresses of a host, all of which must be public."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from lightserve.errors import InvalidRequestError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# one text for a name without addresses and one with a private address: a client learns nothing of a private network
NOT_PUBLIC = "its host has no public address ({flag} allows hosts with others)"


def look_up(host: str, port: int) -> list[str]:
    """Of the system's resolver; it may take long. Addresses are returned as they are."""
    try:
        return list(dict.fromkeys(str(row[4][0]) for row in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
    except (OSError, UnicodeError):
        return []


def checked(addresses: Sequence[str], may_be_private: bool, flag: str) -> list[str]:
    """A host with one address that is not public is refused as a whole. ``flag`` allows it."""
    if not addresses or not (may_be_private or all(map(is_public, addresses))):
        raise InvalidRequestError(NOT_PUBLIC.format(flag=flag))
    return list(addresses)


def is_public(text: str) -> bool:
    try:
        address = _unpacked(ipaddress.ip_address(text))
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.is_site_local:
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _unpacked(address: Address) -> Address:
    """The IPv4 address that an IPv6 address leads to, if there is one."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address.teredo is not None:
        return address.teredo[1]
    return address.ipv4_mapped or address.sixtofour or address
