"""The launcher: ``python -m lightserve.server.api_server [flags]``. The server starts and ends here.

    check ─▶ listen ─▶ start every process ─▶ wait until all are ready ─▶ serve ─▶ drain ─▶ kill every process

The launcher starts the model workers, the router, the detokenizer and the HTTP processes, and supervises them: it
replaces workers and HTTP processes that die, and ends the server when another process dies. It serves no request and
imports no torch.

Read on in this order: process_group.py (start, ready), engine_supervisor.py, worker_supervisor.py and
process_supervisor.py (restart), watchdog.py (heartbeats), shutdown.py (drain, report). child_process.py is one process.

Exit codes: 0 after a signal, when running requests have finished; 1 when a process died; 2 when the operator must fix
a flag, a file or a port; 128 + n when signal n ended the server at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple

from lightserve.batches.store import opened_folder
from lightserve.config import ServerConfig
from lightserve.config.parse import MODULE, parse_server
from lightserve.errors import LightserveError
from lightserve.ipc.process import EXIT_CONFIG_ERROR, error_line
from lightserve.messages.control import StartupPhase
from lightserve.server.banner import banner, print_banner, print_error, print_line
from lightserve.server.checks import ModelInfo, check, with_local_files
from lightserve.server.engine_supervisor import supervise_engines
from lightserve.server.images import with_images
from lightserve.server.keys import with_keys
from lightserve.server.node_host import run_node
from lightserve.server.process_group import Modules, ProcessGroup
from lightserve.server.process_supervisor import EncoderSupervisor, HttpSupervisor
from lightserve.server.reload import Reloader
from lightserve.server.run_directory import run_directory
from lightserve.server.shutdown import (
    ENDED,
    SIGNAL_EXIT_BASE,
    StopNowError,
    drain,
    drain_engine,
    report_failure,
    stop_signals,
)
from lightserve.server.watchdog import watch_heartbeats
from lightserve.utils import net
from lightserve.utils.logger import set_log_format


def main(argv: Sequence[str] | None = None, modules: Modules | None = None, prog: str = MODULE) -> int:
    begin_s = time.monotonic()
    try:
        config = parse_server(argv, prog)
        reloader = Reloader(config, lambda: parse_server(argv, prog))
        if config.launch.log_format is not None:
            set_log_format(config.launch.log_format)
        if not config.is_other_node:  # it has no HTTP
            config = with_keys(config)
        model = check(config)
        config = with_images(with_local_files(config, model))
        net.raise_fd_limit()
        if config.is_other_node:
            return asyncio.run(run_node(config, modules or Modules()))
        is_engine = config.cluster.listen is not None  # it has no HTTP
        sockets = [] if is_engine else net.listen(config.http.host, config.http.port, config.http.num_processes)
        setup = ProcessSetup(modules or Modules(), None if is_engine else reloader)
        return asyncio.run(launch(config, model, sockets, setup, begin_s))
    except LightserveError as error:
        print_error(error_line(error))
        return EXIT_CONFIG_ERROR
    except KeyboardInterrupt:
        return SIGNAL_EXIT_BASE + signal.SIGINT


class ProcessSetup(NamedTuple):
    modules: Modules
    reloader: Reloader | None  # None: no process has HTTP


async def launch(
    config: ServerConfig, model: ModelInfo, sockets: Sequence[socket.socket], setup: ProcessSetup, begin_s: float
) -> int:
    reloader = setup.reloader
    # from here on, a signal ends this process only after it has cleaned up
    signals = stop_signals() if reloader is None else stop_signals(reloader.request)
    with run_directory() as run_dir, contextlib.ExitStack() as exits:
        for sock in sockets:
            exits.enter_context(sock)
        if config.http.batch_dir is not None:
            exits.enter_context(opened_folder(config.http.batch_dir))
        processes = ProcessGroup(config, run_dir, setup.modules)
        launcher = Launcher(config, model, processes, signals, reloader)
        exit_code = await launcher.run(sockets, begin_s)
    if exit_code == 0:
        print_line(ENDED)
    return exit_code


class Launcher:
    """One run of the server."""

    def __init__(
        self,
        config: ServerConfig,
        model: ModelInfo,
        processes: ProcessGroup,
        signals: asyncio.Queue[signal.Signals],
        reloader: Reloader | None,
    ) -> None:
        """``reloader`` None: the server has no HTTP."""
        self._config = config
        self._model = model
        self._processes = processes
        self._signals = signals
        self._reloader = reloader
        self._is_serving = False
        self._stop_requested = asyncio.Event()

    async def run(self, sockets: Sequence[socket.socket], begin_s: float) -> int:
        """Serve until a signal arrives or a process dies. Return the exit code."""
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(self._handle_signals())]
                is_https = self._config.http.ssl_certfile is not None
                url = self._config.cluster.listen or net.url_of(sockets[0], is_https)
                await self._processes.start(sockets)
                background += [tasks.create_task(work) for work in self._supervision()]
                await self._wait_ready(url, begin_s, started_s=time.monotonic())
                await self._stop_requested.wait()
                end = drain if self._config.cluster.listen is None else drain_engine
                await end(self._processes, self._config.launch.drain_timeout)
                for task in background:
                    task.cancel()
            return 0
        except ExceptionGroup as errors:
            return await report_failure(errors, self._processes, self._is_serving)
        finally:
            for child in await self._processes.kill_all():
                print_line(f"{child.role} (process {child.pid}) did not exit after SIGKILL")

    def _supervision(self) -> list[Coroutine[Any, Any, None]]:
        """The background work that detects failures of the child processes."""
        processes, config = self._processes, self._config.launch
        supervised = {child for engine in processes.engines for child in (*engine.workers, engine.router)}
        encoders = [(engine, index) for engine in processes.engines for index in range(len(engine.encoders))]
        supervised |= {*processes.httpservers, *(engine.encoders[index] for engine, index in encoders)}
        others = [child.watch() for child in processes.children if child not in supervised]
        engines = supervise_engines(processes, config)
        http = [HttpSupervisor(processes, index, config).run() for index in range(len(processes.httpservers))]
        encoding = [EncoderSupervisor(processes, *encoder, config).run() for encoder in encoders]
        reloads = [] if self._reloader is None else [self._reloader.run(processes)]
        return [*others, engines, *http, *encoding, *reloads, watch_heartbeats(processes, config.process_timeout)]

    async def _handle_signals(self) -> None:
        """The first signal drains the server. A second one, or one during the start, ends it at once."""
        signum = await self._signals.get()
        if self._is_serving:
            timeout_s = self._config.launch.drain_timeout
            print_line(f"{signum.name}: waiting up to {timeout_s:g} s for running requests")
            self._stop_requested.set()
            signum = await self._signals.get()
        raise StopNowError(signum)

    async def _wait_ready(self, url: str, begin_s: float, started_s: float) -> None:
        engine = await self._processes.wait_ready()
        self._is_serving = True
        start_phases = [
            StartupPhase("checks", started_s - begin_s),
            StartupPhase("total", time.monotonic() - begin_s),
        ]
        config = self._config
        phases = {child.role: child.phases for child in self._processes.children} | {"start": start_phases}
        rows = banner(url, self._model, engine, config.http, phases, config.cluster)
        encoders = self._processes.engines[0].encoders if self._processes.engines else []
        if encoders:
            number = f"{len(encoders)} encoders, each with " if len(encoders) > 1 else ""
            limits = config.http.media_limits
            name = "sounds" if limits["audio"] else "images"
            rows[name] = f"up to {max(limits.values())} of a request; {number}{encoders[0].summary}"
        print_banner(url, rows)


if __name__ == "__main__":
    sys.exit(main())
