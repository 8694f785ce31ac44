"""How an HTTP process takes connections from its port."""

from __future__ import annotations

import asyncio
import socket
import time

import uvloop

from lightserve.httpserver.main import ACCEPTS_PER_ITERATION, _listeners
from test.waiting import until

ROUND_S = 0.02  # what every round of the loop takes here, as under load


def iterations_to_accept(count: int, is_shared_out: bool) -> int:
    """How many rounds of the loop pass until so many clients that wait are accepted."""

    async def scenario() -> int:
        loop = asyncio.get_running_loop()
        iterations = accepted = 0

        class Noted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                nonlocal accepted
                accepted += 1

        def be_busy() -> None:
            nonlocal iterations
            iterations += 1
            time.sleep(ROUND_S)
            if accepted < count:
                loop.call_soon(be_busy)

        with socket.create_server(("127.0.0.1", 0), backlog=count) as listener:
            clients = [socket.create_connection(listener.getsockname()) for _ in range(count)]
            listeners = _listeners(listener) if is_shared_out else [listener]
            servers = [await loop.create_server(Noted, sock=sock) for sock in listeners]
            be_busy()
            await until(lambda: accepted == count)
            for server in servers:
                server.close()
            for client in clients:
                client.close()
        return iterations

    return uvloop.run(scenario())


def test_several_connections_are_accepted_in_one_iteration_of_the_event_loop() -> None:
    count = ACCEPTS_PER_ITERATION

    assert iterations_to_accept(count, is_shared_out=True) < iterations_to_accept(count, is_shared_out=False) / 2
