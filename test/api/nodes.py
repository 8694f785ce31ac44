"""One server whose ranks are on several nodes: groups of processes on this machine that only meet over TCP."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightserve.links.keys import generate
from test.api.server import MODULE, START_S, STOP_S, ServerProcess, start_server
from test.ports import free_port
from test.waiting import wait_until


class Nodes:
    """Node 0 is the server. ``start`` them in any order; all end with the context of ``nodes_in``."""

    def __init__(self, folder: Path, count: int, flags: Sequence[str], address: str = "127.0.0.1") -> None:
        self.folder = folder
        self.keys = folder / "keys"
        generate(self.keys)
        self.port = str(free_port())
        self._flags = [*flags, "--nnodes", str(count), "--master_addr", address, "--master_port", self.port]
        self._starts = 0
        self.prefixes: dict[int, list[str]] = {}  # of a node's command
        self.all: list[ServerProcess] = []

    def start(self, node: int, *more: str, keys: Path | None = None) -> ServerProcess:
        """``more``: flags that win."""
        self._starts += 1
        command = [*self.prefixes.get(node, []), sys.executable, *MODULE, *self._flags]
        command += ["--node_rank", str(node), "--cluster_keys", str(keys or self.keys), *more]
        if "--listen" not in self._flags:  # it has HTTP
            command += ["--port", "0"]
        server = start_server(self.folder / f"log-{self._starts}-node-{node}", command)
        self.all.append(server)
        return server

    def wait_ready(self, server: ServerProcess) -> None:
        wait_until(lambda: "ready at" in server.log or server.has_ended, START_S)
        assert not server.has_ended, self.logs()
        wait_until(server.is_healthy)

    def logs(self) -> str:
        return "\n".join(f"--- {server.log_path.name}\n{server.log}" for server in self.all)


@contextmanager
def nodes_in(folder: Path, count: int, *flags: str, address: str = "127.0.0.1") -> Iterator[Nodes]:
    folder.mkdir(exist_ok=True)
    nodes = Nodes(folder, count, flags, address)
    try:
        yield nodes
    finally:
        for server in nodes.all:
            if not server.has_ended:
                server.process.kill()  # its child processes exit too
                server.process.wait(STOP_S)
