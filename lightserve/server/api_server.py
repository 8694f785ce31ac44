"""The launcher: ``python -m lightserve.server.api_server [flags]``. The server begins here and ends here.

    check ─▶ listen ─▶ start every process ─▶ wait for their ready words ─▶ serve ─▶ drain ─▶ end every process

It starts the model workers, the router, the detokenizer and the HTTP processes, and owns their lives: workers that die
are replaced, and when another process dies, all end. It serves no request and imports no torch. Exit codes: 0 after a
signal, once running requests were done; 1 when a process died; 2 when there is something for the operator to mend;
128 + n when signal n did not wait.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from lightserve.config import ServerConfig
from lightserve.errors import LightserveError
from lightserve.io_struct import Drain, EngineDied, Phase
from lightserve.server.args import parse_server
from lightserve.server.banner import banner, say, show
from lightserve.server.checks import ModelFacts, check
from lightserve.server.child import ChildDiedError
from lightserve.server.fleet import Fleet, Modules
from lightserve.server.keys import with_keys
from lightserve.server.run_directory import run_directory
from lightserve.server.watchdog import watch_for_silence
from lightserve.server.worker_keeper import WorkerKeeper
from lightserve.utils import net
from lightserve.utils.process import EXIT_CRASH, EXIT_MISTAKE, STOP_SIGNALS, one_line

FAREWELL_S = 3.0  # for the HTTP processes to tell their clients that it is over

SIGNALS_OFF = 128  # an exit code above this names a signal


class StopNowError(Exception):
    """A signal that does not wait."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum)
        self.signum = signum


def main(argv: Sequence[str] | None = None, modules: Modules | None = None) -> int:
    begin_s = time.monotonic()
    try:
        config = with_keys(parse_server(argv))
        model = check(config)
        net.raise_fd_limit()
        sockets = net.listen(config.http.host, config.http.port, config.http.num_processes)
        return asyncio.run(launch(config, model, sockets, modules or Modules(), begin_s))
    except LightserveError as error:
        say(one_line(error))
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        return SIGNALS_OFF + signal.SIGINT


async def launch(
    config: ServerConfig, model: ModelFacts, sockets: Sequence[socket.socket], modules: Modules, begin_s: float
) -> int:
    signals = stop_signals()  # from here on none of them ends this process before it has cleaned up
    with run_directory() as run_dir:
        return await Launcher(config, model, Fleet(config, run_dir, modules), signals).run(sockets, begin_s)


class Launcher:
    """One run of the server."""

    def __init__(
        self, config: ServerConfig, model: ModelFacts, fleet: Fleet, signals: asyncio.Queue[signal.Signals]
    ) -> None:
        self._config = config
        self._model = model
        self._fleet = fleet
        self._signals = signals
        self._is_serving = False
        self._is_asked_to_stop = asyncio.Event()

    async def run(self, sockets: Sequence[socket.socket], begin_s: float) -> int:
        """Until a signal ends it or a process dies; the exit code."""
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(self._heed_signals())]
                url = net.url_of(sockets[0], is_https=self._config.http.ssl_certfile is not None)
                await self._fleet.start(sockets)
                background += [tasks.create_task(work) for work in self._watches()]
                await self._open(url, begin_s, started_s=time.monotonic())
                await self._is_asked_to_stop.wait()
                await self._drain()
                for task in background:
                    task.cancel()
            return 0
        except ExceptionGroup as errors:
            return await self._explain(errors)
        finally:
            for child in await self._fleet.end():
                say(f"{child.role} (process {child.pid}) does not end, although it was killed")

    def _watches(self) -> list[Coroutine[Any, Any, None]]:
        fleet, config = self._fleet, self._config.launch
        keeper = WorkerKeeper(fleet, config)
        others = [child.watch() for child in fleet.children if child not in fleet.workers]
        return [*others, keeper.run(), keeper.heed_router(), watch_for_silence(fleet, config.process_timeout)]

    async def _heed_signals(self) -> None:
        """The first one asks for an orderly end of serving; a second one, or one during the start, does not wait."""
        signum = await self._signals.get()
        if self._is_serving:
            say(f"{signum.name}: waiting up to {self._config.launch.drain_timeout:g} s for running requests")
            self._is_asked_to_stop.set()
            signum = await self._signals.get()
        raise StopNowError(signum)

    async def _open(self, url: str, begin_s: float, started_s: float) -> None:
        engine = await self._fleet.ready()
        self._is_serving = True
        own = [Phase("checks", started_s - begin_s), Phase("in all", time.monotonic() - begin_s)]
        phases = {child.role: child.phases for child in self._fleet.children} | {"start": own}
        show(banner(url, self._model, engine, self._config.http.num_processes, phases))

    async def _drain(self) -> None:
        if not await self._fleet.wind_up(Drain(), within_s=self._config.launch.drain_timeout):
            say("some requests were not done in time; they end with an error")
            await self._fleet.wind_up(EngineDied("the server was stopped"), Drain(), within_s=FAREWELL_S)

    async def _explain(self, errors: ExceptionGroup) -> int:
        match errors.exceptions[0]:
            case StopNowError() as stop:
                say(f"{stop.signum.name}: stopped at once")
                return SIGNALS_OFF + stop.signum
            case ChildDiedError() as died:
                return await self._mourn(await self._fleet.culprit(died))
            case _:
                raise errors

    async def _mourn(self, died: ChildDiedError) -> int:
        if not self._is_serving and died.exit_code == EXIT_MISTAKE:
            say(died.child.last_words or died)
            return EXIT_MISTAKE
        say(died)
        if self._is_serving:
            news = EngineDied(f"the server is going down: its {died.child.role} died")  # last words may hold a path
            await self._fleet.wind_up(news, Drain(), within_s=FAREWELL_S)
        return EXIT_CRASH


def stop_signals() -> asyncio.Queue[signal.Signals]:
    """Those that come from now on."""
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for signum in STOP_SIGNALS:
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup wants it ignored
            asyncio.get_running_loop().add_signal_handler(signum, signals.put_nowait, signum)
    return signals


if __name__ == "__main__":
    sys.exit(main())
