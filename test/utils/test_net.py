from __future__ import annotations

import os
import resource
import socket
import sys
from pathlib import Path

import pytest

from lightserve.errors import ServerError
from lightserve.utils import net


def test_a_single_process_does_not_share_its_port() -> None:
    (sock,) = net.listen("127.0.0.1", 0, 1)

    with sock:
        assert net.url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
        assert not sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)
        socket.create_connection(sock.getsockname()).close()


def test_several_processes_share_one_port() -> None:
    sockets = net.listen("127.0.0.1", 0, 3)

    assert len({sock.getsockname() for sock in sockets}) == 1
    assert len({sock.fileno() for sock in sockets}) == 3
    for sock in sockets:
        sock.close()


def test_a_port_in_use_is_reported_with_its_process_even_if_that_would_share() -> None:
    holders = net.listen("127.0.0.1", 0, 2)
    port = holders[0].getsockname()[1]

    holder = rf"process {os.getpid()}, child of {os.getppid()} \(.*python.*\)"
    with pytest.raises(ServerError, match=f"port {port} is in use by {holder}; stop it"):
        net.listen("127.0.0.1", port, 2)
    for sock in holders:
        sock.close()


def test_a_port_with_a_connection_in_time_wait_is_free() -> None:
    (sock,) = net.listen("127.0.0.1", 0, 1)
    address = sock.getsockname()
    client = socket.create_connection(address)
    served, _ = sock.accept()
    served.close()  # the side that closes first keeps the port in TIME_WAIT
    client.close()
    sock.close()

    net.bind(*address).close()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
@pytest.mark.parametrize(("host", "shown"), [("::1", "[::1]"), ("[::1]", "[::1]"), ("::", "[::1]")])
def test_ipv6_hosts_work(host: str, shown: str) -> None:
    (sock,) = net.listen(host, 0, 1)

    with sock:
        assert net.url_of(sock) == f"http://{shown}:{sock.getsockname()[1]}"


def test_a_name_with_both_kinds_of_address_uses_ipv4() -> None:
    (sock,) = net.listen("localhost", 0, 1)

    with sock:
        assert sock.family == socket.AF_INET


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("no.such.host.invalid", "is not an address"),
        ("203.0.113.1", "is not an address of this machine; set --host to"),
    ],
)
def test_a_host_that_is_not_this_machine_is_reported(host: str, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        net.bind(host, 0)


def test_the_limit_of_open_files_is_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))

    net.raise_fd_limit()

    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_connections_detect_a_client_whose_machine_lost_power() -> None:
    (sock,) = net.listen("127.0.0.1", 0, 1)

    with sock, socket.create_connection(sock.getsockname()), sock.accept()[0] as connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for name, value in net.KEEP_ALIVE.items():
            assert (
                not hasattr(socket, name) or connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value
            )


@pytest.mark.parametrize(
    ("host", "is_local"), [("127.0.0.1", True), ("localhost", True), ("127.3.2.1", True), ("0.0.0.0", False)]
)
def test_only_loopback_is_local(host: str, is_local: bool) -> None:
    assert net.is_local(host) is is_local


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' tables")
def test_the_own_address_that_another_one_is_reached_from_is_found() -> None:
    assert net.address_to("localhost") == net.address_to("127.0.0.1") == "127.0.0.1"


def test_the_interface_to_an_address_is_found() -> None:
    assert net.interface_to("127.0.0.1") == "lo"
    assert net.interface_to("localhost") == "lo"
    with pytest.raises(ServerError, match="no such host"):
        net.interface_to("no such host")
