"""An HTTP process: uvicorn on a socket that the launcher opened."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractContextManager

import uvicorn

from lightserve.config import HttpConfig
from lightserve.httpserver.app import build_app
from lightserve.httpserver.chat.output import output_formats
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.manager import HttpServerManager
from lightserve.httpserver.wire.protocol import LimitedProtocol
from lightserve.io_struct import Drain, Drained, EngineDied, EngineReady, Ready, ToHttpserver, ToRouter
from lightserve.model_files.source import resolve
from lightserve.model_files.tokenizer import tokenizer_if_any
from lightserve.utils.channel import Receiver, Sender
from lightserve.utils.process import Boot, Parent, run_child
from lightserve.utils.tls import server_context

KEEP_ALIVE_S = 75  # longer than the idle time of common client pools, so that they do not race with us closing

# With 2,500 connections at once, p99 of /health on two cores, in ms: of 8 a round 800 to 1,650, of 32 215 to 470, of 64
# 165 to 280, of 128 133 to 173. A round without a connection costs nothing, one with one some 50 us.
ACCEPTS_PER_ROUND = 128


async def main(boot: Boot, parent: Parent) -> None:
    config = boot.config
    from_detokenization: Receiver[ToHttpserver] = Receiver(boot.address(f"http-{boot.index}"), ToHttpserver)
    to_router: Sender[ToRouter] = Sender(boot.address("router"))
    manager = HttpServerManager(boot.index, to_router, from_detokenization)
    source = resolve(config.worker.model_dir, needs_weights=False)
    name = config.http.model_name or source.name
    context = ServerContext(config.http, name, manager, tokenizer_if_any(source))
    context.warm_up()
    output_formats(context)  # a flag that names none is told now
    server = _Server(context, parent)
    async with asyncio.TaskGroup() as tasks:  # any of them that fails ends the process, and the launcher tells why
        tasks.create_task(manager.run())
        tasks.create_task(_obey(parent, manager))
        tasks.create_task(server.serve(sockets=_listeners(socket.socket(fileno=boot.listen_fd))))


def _listeners(sock: socket.socket) -> list[socket.socket]:
    """The same socket several times: the event loop accepts one connection a round from each."""
    return [sock, *(sock.dup() for _ in range(ACCEPTS_PER_ROUND - 1))]


class _Server(uvicorn.Server):
    """Says when it listens; leaves signals to the launcher."""

    def __init__(self, context: ServerContext, parent: Parent) -> None:
        config = uvicorn.Config(
            build_app(context),
            http=LimitedProtocol,
            loop="none",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_context_factory=_tls_of(context.config),
        )
        super().__init__(config)
        self._parent = parent

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.freeze()  # what is alive now lives for ever: no collection need look at it
        self._parent.send(Ready())

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def _tls_of(config: HttpConfig) -> Callable[..., ssl.SSLContext] | None:
    if config.ssl_certfile is None:
        return None
    context = server_context(config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
    return lambda *_: context


async def _obey(parent: Parent, manager: HttpServerManager) -> None:
    """Do what the launcher says."""
    async with asyncio.TaskGroup() as tasks:
        while True:
            message = await parent.recv()
            if isinstance(message, EngineReady):
                manager.serve(message)
            elif isinstance(message, EngineDied):
                manager.die(message.message)
            elif isinstance(message, Drain):
                manager.drain()
                tasks.create_task(_tell_drained(parent, manager))


async def _tell_drained(parent: Parent, manager: HttpServerManager) -> None:
    await manager.drained()
    parent.send(Drained())


if __name__ == "__main__":
    run_child("httpserver", main)
