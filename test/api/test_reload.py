"""Keys and certificates that change while the server runs."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from test.api.server import ServerProcess, running_server
from test.api.test_tls import TLS
from test.waiting import wait_until

pytestmark = pytest.mark.slow


def status_of(server: ServerProcess, key: str) -> int:
    return server.post("/v1/completions", {"prompt": [5], "max_tokens": 1}, Authorization=f"Bearer {key}")[0]


def write(path: Path, text: str) -> None:
    """As editors and Kubernetes do: another file takes the name."""
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(text)
    new.rename(path)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    write(tmp_path / "keys", "sk-one\n")
    return tmp_path / "keys"


def test_keys_of_a_file_are_valid_without_a_restart_in_every_http_process(keys: Path, tmp_path: Path) -> None:
    flags = ("--null_worker", "--httpserver_workers", "2", "--api_key_file", str(keys))
    with running_server(tmp_path / "log", *flags) as server:
        assert [status_of(server, key) for key in ("sk-one", "sk-two")] == [200, 401]

        write(keys, "sk-two\nsk-three\n")
        server.wait_for_log("keys are read again: 2 API keys, 0 admin keys")

        for _ in range(8):  # a connection each: both processes get some
            wait_until(lambda: status_of(server, "sk-one") == 401)
            assert [status_of(server, key) for key in ("sk-two", "sk-three")] == [200, 200]
        for name in ("ls-httpserver", "ls-httpserver-1"):
            (process,) = server.processes()[name]
            process.kill()
        wait_until(lambda: server.log.count("a new HTTP process is ready") == 2)
        assert [status_of(server, key) for key in ("sk-one", "sk-two")] == [401, 200]
        assert not any(key in server.log for key in ("sk-one", "sk-two", "sk-three"))


def damage_bytes(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00damaged")


def replace_by_a_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def test_a_damaged_key_file_keeps_the_keys(keys: Path, tmp_path: Path) -> None:
    with running_server(tmp_path / "log", "--null_worker", "--api_key_file", str(keys)) as server:
        for damage, reason in (
            (damage_bytes, "codec can't decode"),
            (lambda path: write(path, "# none\n"), "contains no key"),
            (lambda path: path.unlink(), "No such file"),
            (replace_by_a_folder, "is not a regular file"),
        ):
            damage(keys)
            server.wait_for_log(reason)
            assert [status_of(server, key) for key in ("sk-one", "sk-two")] == [200, 401]

        assert server.log.count("the keys stay as they were: ") == 4
        assert server.is_healthy()
        keys.rmdir()
        write(keys, "sk-two\n")
        server.wait_for_log("keys are read again: 1 API keys")
        wait_until(lambda: [status_of(server, key) for key in ("sk-one", "sk-two")] == [401, 200])


def test_sighup_reads_flags_of_keys_again_and_names_those_that_need_a_restart(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("api_key: [sk-one]\nmax_queue_size: 10\n")
    with running_server(tmp_path / "log", "--null_worker", "--config", str(config)) as server:
        config.write_text("api_key: [sk-two]\nmax_queue_size: 20\n")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_log("keys are read again: 1 API keys")

        assert "--max_queue_size has changed; restart the server to use it" in server.log
        wait_until(lambda: [status_of(server, key) for key in ("sk-one", "sk-two")] == [401, 200])
        config.write_text("max_queue_size: 10\n")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_log("the keys stay as they were: no key would be left")
        config.write_text("max_queue_sizes: 10\n")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_log("the flags stay as they were")
        assert [status_of(server, key) for key in ("sk-one", "sk-two")] == [401, 200]
        assert psutil.pid_exists(server.process.pid)


def certificate_of(server: ServerProcess) -> bytes:
    place = urlsplit(server.url)
    context = ssl._create_unverified_context()
    with socket.create_connection((place.hostname, place.port)) as sock, context.wrap_socket(sock) as client:
        return client.getpeercert(binary_form=True) or b""


def test_sighup_renews_the_certificate(tmp_path: Path) -> None:
    pair = [tmp_path / "pair.pem", tmp_path / "pair.key"]
    for name, path in zip(("server.pem", "server.key"), pair, strict=True):
        shutil.copy(f"{TLS}/{name}", path)
    flags = ("--null_worker", "--ssl_certfile", str(pair[0]), "--ssl_keyfile", str(pair[1]))
    unverified = ssl._create_unverified_context()
    with running_server(tmp_path / "log", *flags, tls=unverified) as server:
        before = certificate_of(server)
        shutil.copy(f"{TLS}/client.pem", pair[0])
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_log("the certificate stays as it was: ")
        assert certificate_of(server) == before

        shutil.copy(f"{TLS}/client.key", pair[1])
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_log("is read again, for new connections")

        renewed = ssl.PEM_cert_to_DER_cert(pair[0].read_text())
        wait_until(lambda: certificate_of(server) == renewed)
