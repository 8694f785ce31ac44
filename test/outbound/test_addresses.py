from __future__ import annotations

import pytest

from lightserve.errors import InvalidRequestError
from lightserve.outbound.addresses import checked, is_public, look_up


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.0.0.1",
        "100.64.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "172.16.0.1",
        "192.168.1.1",
        "198.18.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fec0::1",
        "ff0e::1",
        "2001:db8::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::7f00:1",
        "2002:7f00:1::",
        "2001:0:808:808:0:0:80ff:fffe",
        "::127.0.0.1",
        "nonsense",
    ],
)
def test_others(address: str) -> None:
    assert not is_public(address)


def test_one_private_address_refuses_the_host() -> None:
    addresses = ["8.8.8.8", "10.0.0.1"]

    with pytest.raises(InvalidRequestError, match="has no public address"):
        checked(addresses, may_be_private=False, flag="--hosts")
    assert checked(addresses, may_be_private=True, flag="--hosts") == addresses
    assert checked(["8.8.8.8"], may_be_private=False, flag="--hosts") == ["8.8.8.8"]


def test_a_name_without_addresses_has_none() -> None:
    assert look_up("127.0.0.1", 443) == ["127.0.0.1"]
    assert look_up("a" * 64 + ".invalid", 443) == []
