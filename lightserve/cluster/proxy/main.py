"""``python -m lightserve.cluster.proxy.main PID FOLDER``: HAProxy before several gateways. It ends with process PID.

FOLDER has ``proxy.json``, the ProxySettings, and ``gateways.json``, a list of URLs that may change at any time: one for
each gateway, "" while it has none.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from lightserve.cluster.proxy.fan_out import FanOut
from lightserve.cluster.proxy.haproxy import HAProxy
from lightserve.cluster.proxy.haproxy_config import ProxySettings
from lightserve.errors import LightserveError
from lightserve.ipc.child_setup import end_with_parent
from lightserve.ipc.process import EXIT_CONFIG_ERROR, EXIT_CRASH
from lightserve.utils.logger import init_logger

logger = init_logger("lightserve.cluster.proxy.main")  # the name of this module is __main__

READ_S = 0.25  # between two looks at gateways.json


class Proxy:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._settings = msgspec.json.decode((folder / "proxy.json").read_bytes(), type=ProxySettings)
        self._urls = self._read()
        self._stop_requested = threading.Event()

    def run(self) -> int:
        """Until it is stopped, or HAProxy ends. Returns the exit code."""
        settings = self._settings
        port = settings.port or _free_port(settings.host)
        haproxy = HAProxy(settings, port, self._addresses(), self._folder)
        fan_out = FanOut(self._folder / "fan_out.sock", lambda: [url for url in self._urls if url])
        threading.Thread(target=fan_out.serve_forever, name="fan-out", daemon=True).start()
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        is_ready = False
        while (code := haproxy.wait(READ_S)) is None and not self._stop_requested.is_set():
            self._update(haproxy)
            if not is_ready and any(self._urls):
                is_ready = True
                logger.info("ready at %s://%s:%d", settings.scheme, host, port)
        if code is None:
            haproxy.stop()
            return 0
        logger.error("HAProxy ended with exit code %d: %s", code, haproxy.reason())
        return EXIT_CRASH

    def stop(self) -> None:
        self._stop_requested.set()

    def _update(self, haproxy: HAProxy) -> None:
        urls = self._read()
        if urls == self._urls:
            return
        old, self._urls = self._urls, urls
        try:
            haproxy.use(self._addresses())
        except OSError as error:
            logger.warning("HAProxy does not take new addresses: %s", error)
            self._urls = old  # the next look tries again

    def _read(self) -> list[str]:
        return msgspec.json.decode((self._folder / "gateways.json").read_bytes(), type=list[str])

    def _addresses(self) -> list[str]:
        return [urlsplit(url).netloc for url in self._urls]


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        return port


def main(argv: list[str]) -> int:
    end_with_parent()
    if os.getppid() != int(argv[0]):  # it ended before the line above
        return EXIT_CRASH
    try:
        proxy = Proxy(Path(argv[1]))
        signal.signal(signal.SIGTERM, lambda *_: proxy.stop())
        return proxy.run()
    except LightserveError as error:
        print(f"lightserve: {error}", file=sys.stderr, flush=True)
        return EXIT_CONFIG_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
