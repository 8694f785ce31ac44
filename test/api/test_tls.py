"""The server over HTTPS with client certificates. The test certificates are valid until 2120."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lightserve.links.tls import server_context
from test.api.server import ServerProcess, running_server

TLS = Path(__file__).parent / "tls"
FLAGS = ("--ssl_certfile", f"{TLS}/server.pem", "--ssl_keyfile", f"{TLS}/server.key")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("tls") / "log"
    flags = ("--null_worker", *FLAGS, "--ssl_ca_certs", f"{TLS}/authority.pem")
    with running_server(log, *flags, tls=client_context()) as server:
        yield server


def client_context(has_certificate: bool = True) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=f"{TLS}/authority.pem")
    if has_certificate:
        context.load_cert_chain(f"{TLS}/client.pem", f"{TLS}/client.key")
    return context


def connection(server: ServerProcess, context: ssl.SSLContext) -> http.client.HTTPSConnection:
    place = urlsplit(server.url)
    return http.client.HTTPSConnection(place.hostname or "", place.port, timeout=60, context=context)


def ask(server: ServerProcess, context: ssl.SSLContext, headers: dict[str, str], **fields: object) -> tuple[int, bytes]:
    body = json.dumps({"prompt": "Hello", "max_tokens": 3, **fields})
    client = connection(server, context)
    try:
        client.request("POST", "/v1/completions", body, {"Content-Type": "application/json", **headers})
        response = client.getresponse()
        return response.status, response.read()
    finally:
        client.close()


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_with_a_certificate_is_served(server: ServerProcess, is_stream: bool) -> None:
    status, response = ask(server, client_context(), {}, stream=is_stream)

    assert server.url.startswith("https://")
    assert status == 200
    assert (
        response.endswith(b"data: [DONE]\n\n") if is_stream else json.loads(response)["usage"]["completion_tokens"] == 3
    )


def test_a_client_without_a_certificate_is_refused(server: ServerProcess) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(server, client_context(has_certificate=False), {})


def test_old_tls_versions_are_refused() -> None:
    context = server_context(f"{TLS}/server.pem", f"{TLS}/server.key", None)

    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_a_request_with_too_large_headers_gets_an_error_body(server: ServerProcess) -> None:
    status, response = ask(server, client_context(), {"X-Large": "x" * 60_000, "X-Larger": "x" * 60_000})

    assert status == 431
    assert "larger than" in json.loads(response)["error"]["message"]


def test_plain_http_gets_no_response_and_affects_no_other_client(server: ServerProcess) -> None:
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), timeout=60) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            seen = b"".join(iter(lambda: sock.recv(65536), b""))
        except ConnectionError:
            seen = b""

    assert b"HTTP/1.1" not in seen
    assert ask(server, client_context(), {})[0] == 200
    assert "Traceback" not in server.log
