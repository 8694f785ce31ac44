"""Addresses in flags: of engines, of Redis, of collectors."""

from __future__ import annotations

from urllib.parse import urlsplit

from lightserve.errors import OptionError
from lightserve.utils.net import parse_redis, parse_tcp

MAX_ENGINES = 64  # of one machine


def check_addresses(source: str, addresses: list[str]) -> None:
    """Raise an OptionError if these are no engines of one gateway. ``source``: the flag or the file."""
    for text in addresses:
        check_address(f"{source}=", text)
    if twice := next((address for address in addresses if addresses.count(address) > 1), None):
        raise OptionError(f"{source}: {twice} is there twice")
    if len(addresses) > MAX_ENGINES:
        raise OptionError(f"{source}: {len(addresses)} addresses; there may be {MAX_ENGINES}")


def check_address(source: str, text: str) -> None:
    try:
        parse_tcp(text)
    except ValueError as error:
        raise OptionError(f"{source}{text!r}: {error}; an address is tcp://HOST:PORT") from error


def check_kv_address(text: str) -> None:
    if text.startswith("unix:///"):
        return
    try:
        parse_tcp(text)
    except ValueError as error:
        raise OptionError(f"kv_listen={text!r}: {error}; an address is tcp://HOST:PORT or unix:///PATH") from error


def is_http_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:
        return False


def check_redis(flag: str, url: str) -> None:
    try:
        parse_redis(url)
    except ValueError as error:
        raise OptionError(f"{flag}: {error}") from error  # without the address: it may have a password
