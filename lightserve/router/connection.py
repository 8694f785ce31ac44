"""The router's end of the rpyc connections to the model workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from rpyc.core.channel import Channel
from rpyc.utils.factory import connect_channel

from lightserve.router.loop_stream import LoopStream

RPYC_CONFIG = {"allow_pickle": False, "sync_request_timeout": None, "include_local_version": False}


def connect(socket_path: str) -> Any:
    """Without compression: rpyc would spend 1.5 ms on the step of an 8,000-token prompt, and some on large batches."""
    return connect_channel(Channel(LoopStream.unix_connect(socket_path), compress=False), config=RPYC_CONFIG)


def close_all(loop: asyncio.AbstractEventLoop, connections: Iterable[tuple[int, Any]]) -> None:
    """Close connections, given with their file numbers, and stop reading them.

    The sockets close first: rpyc's own close waits for a response, which a worker that hangs never sends.
    """
    for fileno, connection in connections:
        if not connection.closed:
            if not connection._channel.closed:
                loop.remove_reader(fileno)
                connection._channel.close()
            connection.close()
