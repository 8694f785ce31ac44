"""All child processes of one server: start them, pass the ready message on, drain, kill."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from lightserve.config import HttpConfig, ServerConfig
from lightserve.ipc.process import ChildConfig
from lightserve.messages.control import (
    Drain,
    EngineInfo,
    EngineJoined,
    EngineLost,
    HttpProcessLost,
    Keys,
    StartupProgress,
    ToChild,
)
from lightserve.server.child_process import ChildDiedError, ChildProcess
from lightserve.server.engine_processes import NODES_SOCKET, EngineProcesses
from lightserve.utils.progress import ProgressState, StreamOutput

FLUSH_S = 0.2  # from the end of the last request until its last byte is sent
EXIT_SETTLE_S = 0.2  # one death makes other processes exit too: within this time
KILL_TIMEOUT_S = 4.0  # until a killed process has exited; a GPU driver may delay that


class StartDisplay:
    """The progress of a start: one line on a terminal, which the banner replaces; plain lines in a log."""

    def __init__(self) -> None:
        self._output = StreamOutput(sys.stderr, keeps_lines=False)

    def show(self, progress: StartupProgress) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk or a closed pipe must not stop the server
            self._output.show(ProgressState(**msgspec.structs.asdict(progress)))


@dataclass(frozen=True, slots=True)
class Modules:
    """The Python module that each kind of process runs."""

    worker: str = "lightserve.worker.main"
    null_worker: str = "lightserve.worker.null_worker"
    router: str = "lightserve.router.main"
    detokenizer: str = "lightserve.detokenization.main"
    httpserver: str = "lightserve.httpserver.main"
    dispatcher: str = "lightserve.cluster.main"
    nodes: str = "lightserve.cluster.nodes.main"
    encoder: str = "lightserve.encoder.main"


async def _wait_drained(children: Sequence[ChildProcess], timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            for child in children:
                await child.wait_drained()
    except TimeoutError:
        return False
    await asyncio.sleep(FLUSH_S)
    return True


def joined_ready(engines: Sequence[EngineInfo]) -> EngineInfo:
    """The limits of several engines as one: any of them can take the longest request."""
    return msgspec.structs.replace(
        engines[0],
        max_req_total_len=min(engine.max_req_total_len for engine in engines),
        max_total_token_num=sum(engine.max_total_token_num for engine in engines),
    )


class ProcessGroup:
    def __init__(self, config: ServerConfig, run_dir: str, modules: Modules) -> None:
        self.children: list[ChildProcess] = []  # every process started so far, except those that were replaced
        self.httpservers: list[ChildProcess] = []
        num_engines = 0 if config.cluster.is_gateway else config.cluster.dp  # a gateway has none of its own
        self.engines = [EngineProcesses(self, config, run_dir, index) for index in range(num_engines)]
        self.dispatcher: ChildProcess | None = None  # None: there is one engine
        self.is_ready = False  # all processes were ready
        self.show_progress = StartDisplay().show
        self._sockets: Sequence[socket.socket] = ()  # of the HTTP processes
        self._http_generations: list[int] = []  # how many times each of them was replaced
        self._sent_to_http: list[ToChild] = []  # what all of them have got
        self._config = config
        self._run_dir = run_dir
        self._modules = modules

    @property
    def survives_routers(self) -> bool:
        """Whether requests go on elsewhere when a router dies."""
        return self.dispatcher is not None or self._config.cluster.listen is not None

    @property
    def http(self) -> HttpConfig:
        """Of the HTTP processes."""
        return self._config.http

    def use_keys(self, api_key: list[str], admin_key: list[str]) -> None:
        """Only these keys are valid from now on."""
        self._config = replace(self._config, http=replace(self.http, api_key=api_key, admin_key=admin_key))
        self.send_http(self._keys)

    @property
    def _keys(self) -> Keys:
        return Keys(self.http.api_key, self.http.admin_key)

    @property
    def worker_module(self) -> str:
        return self._modules.null_worker if self._config.launch.null_worker else self._modules.worker

    @property
    def encoder_module(self) -> str:
        return self._modules.encoder

    @property
    def router_module(self) -> str:
        return self._modules.router

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Start every process, the slowest to load first, and one HTTP process for each of ``sockets``.

        The sockets stay open as long as the server runs: another HTTP process may need one of them.
        """
        modules = self._modules
        arena_fds = [engine.open_arena() for engine in self.engines if self._config.http.reads_media]
        if self._config.cluster.nnodes > 1:
            await self._start_nodes(arena_fds)
        if self._config.http.reads_media:
            for engine in self.engines:
                await engine.start_first_encoders()
        for engine in self.engines:
            await engine.start_workers()
        if self._config.cluster.listen is None:  # an engine has no text
            await self.start_child("detokenizer", modules.detokenizer, self._child_config())
        if self._config.cluster.has_dispatcher:
            self.dispatcher = await self.start_child("dispatcher", modules.dispatcher, self._child_config())
        for engine in self.engines:
            await engine.start_router()
        self._sockets, self._http_generations = sockets, [0] * len(sockets)
        for index in range(len(sockets)):
            self.httpservers.append(await self._start_httpserver(index))

    async def replace_httpserver(self, index: int) -> None:
        """Start another HTTP process in place of one that has exited, and let the router abort its requests."""
        old, lost = self.httpservers[index], self._http_config(index)
        await old.wait()
        self.children.remove(old)
        self._http_generations[index] += 1
        router = self.dispatcher or self.engines[0].router
        router.send(HttpProcessLost(lost.http_process, self._http_config(index).http_process))
        new = self.httpservers[index] = await self._start_httpserver(index)
        for message in (self._keys, *self._sent_to_http):  # before it accepts a connection
            new.send(message)

    async def _start_httpserver(self, index: int) -> ChildProcess:
        return await self.start_child(f"httpserver {index}", self._modules.httpserver, self._http_config(index))

    def _http_config(self, index: int) -> ChildConfig:
        config = self._child_config(index, self._sockets[index].fileno())
        return msgspec.structs.replace(config, generation=self._http_generations[index])

    async def _start_nodes(self, arena_fds: Sequence[int]) -> None:
        """The process that starts ranks on other nodes. The launcher may connect to its socket at once."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(f"{self._run_dir}/{NODES_SOCKET}")
            sock.listen(self._config.worker.num_ranks * len(self.engines))
            config = msgspec.structs.replace(self._child_config(listen_fd=sock.fileno()), arena_fds=tuple(arena_fds))
            await self.start_child("nodes", self._modules.nodes, config)

    async def wait_ready(self) -> EngineInfo:
        """Pass the workers' ready message to the router, then to the HTTP processes, which then accept requests."""
        engine_infos = [await engine.wait_ready() for engine in self.engines]
        for child in self.children:
            await child.ready.wait()
        for engine, ready in zip(self.engines, engine_infos, strict=True):
            engine.engine, engine.ready_s = ready, time.monotonic()
            self.announce(engine)
        ready = joined_ready(engine_infos) if engine_infos else self._remote_ready()
        self._send_httpservers(ready)
        for child in self.httpservers:
            await child.wait_processed()  # otherwise a client that sees "ready" might still get "the model is loading"
        self.is_ready = True
        return ready

    def _remote_ready(self) -> EngineInfo:
        """Of the first remote engine that has joined."""
        if self.dispatcher is None or self.dispatcher.engine is None:
            raise TypeError("the dispatcher of a gateway must send EngineInfo, not Ready")
        return self.dispatcher.engine

    def announce(self, engine: EngineProcesses) -> None:
        """The engine is ready for requests."""
        if self.dispatcher is not None:
            self.dispatcher.send(EngineJoined(engine.index, engine.epoch))

    def announce_lost(self, engine: EngineProcesses) -> None:
        if self.dispatcher is not None:
            self.dispatcher.send(EngineLost(engine.index))

    async def root_cause(self, died: ChildDiedError) -> ChildDiedError:
        """The death that caused ``died``: a process that fails because another one died may exit first."""
        if died.exit_code < 0:
            return died
        await asyncio.sleep(EXIT_SETTLE_S)
        others = [ChildDiedError(child, child.exit_code) for child in self.children if child.exit_code]
        killed = [death for death in others if death.exit_code < 0]
        failed = others if died.exit_code == 0 else []  # a worker whose router died exits with code 0
        return next(iter(killed + failed), died)

    async def drain_httpservers(self, *messages: ToChild, timeout_s: float) -> bool:
        """Send ``messages`` to the HTTP processes. Return whether all of them drained in time."""
        self._send_httpservers(*messages)
        return await _wait_drained(self.httpservers, timeout_s)

    async def drain_engines(self, timeout_s: float) -> bool:
        """Let the routers of --listen finish what gateways have sent. Return whether they did in time."""
        routers = [engine.router for engine in self.engines if engine.router.exit_code is None]
        for router in routers:
            router.send(Drain())
        return await _wait_drained(routers, timeout_s)

    async def kill_all(self) -> list[ChildProcess]:
        """Kill every process. Return those that did not exit."""
        for child in self.children:
            child.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                for child in self.children:
                    await child.wait()
        return [child for child in self.children if child.exit_code is None]

    def _send_httpservers(self, *messages: ToChild) -> None:
        self._sent_to_http += messages
        self.send_http(*messages)

    def send_http(self, *messages: ToChild) -> None:
        """To the HTTP processes that run now."""
        for child in self.httpservers:
            for message in messages:
                child.send(message)

    def _child_config(self, index: int = 0, listen_fd: int | None = None) -> ChildConfig:
        return ChildConfig(self._config, self._run_dir, index, listen_fd)

    async def start_child(
        self, role: str, module: str, child_config: ChildConfig, env: Mapping[str, str] | None = None
    ) -> ChildProcess:
        child = await ChildProcess.start(role, module, child_config, env or {})
        self.children.append(child)
        return child
