"""Ranks on other nodes read the embeddings of images from the memory of node 0."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightserve.cluster.nodes.streams import SocketEndpoint
from lightserve.ipc.arena import HEADER, MAX_READ_BYTES, ArenaReader
from lightserve.messages.nodes import ConnectArena
from lightserve.server.images import open_arena
from test.cluster.test_nodes import HELLO, Link, check

ROW_BYTES = 3000
CONTENT = np.random.default_rng(0).integers(0, 256, 12 << 20, np.uint8)


def check_reads(folder: Path, scenario: Callable[[str], Awaitable[None]], has_images: bool = True) -> None:
    """``scenario`` gets the path where ranks of node 1 connect."""

    async def relayed(link: Link) -> None:
        node = link.node()
        await node.open(HELLO)
        running = asyncio.create_task(node.run())

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            node.streams.open(ConnectArena(), SocketEndpoint(reader, writer))

        server = await asyncio.start_unix_server(relay, str(folder / "arena"))
        await scenario(str(folder / "arena"))
        server.close()
        running.cancel()

    arena_fd = None
    if has_images:
        arena_fd = open_arena(CONTENT.nbytes / 2**30)
        os.pwrite(arena_fd, CONTENT.tobytes(), 0)
    check(folder, relayed, arena_fd)
    if arena_fd is not None:
        os.close(arena_fd)


async def read(reader: ArenaReader, rows: Any) -> np.ndarray[Any, Any]:
    into = np.zeros((len(rows), ROW_BYTES), np.uint8)
    await asyncio.to_thread(reader.read, np.array(rows, np.int32), into.reshape(-1).data)
    return into


def test_a_rank_gets_the_rows_that_it_asks_for_in_their_order(tmp_path: Path) -> None:
    wanted = CONTENT[: len(CONTENT) // ROW_BYTES * ROW_BYTES].reshape(-1, ROW_BYTES)
    many = np.random.default_rng(1).permutation(len(wanted)).astype(np.int32)
    assert many.size * ROW_BYTES > MAX_READ_BYTES  # several requests

    async def scenario(path: str) -> None:
        first, second = ArenaReader(path), ArenaReader(path)
        found = await asyncio.gather(read(first, many), read(second, [7, 3, 7]))

        assert np.array_equal(found[0], wanted[many])
        assert np.array_equal(found[1], wanted[[7, 3, 7]])
        assert np.array_equal(await read(first, [len(wanted) - 1]), wanted[-1:])

    check_reads(tmp_path, scenario)


@pytest.mark.parametrize("rows", [[len(CONTENT) // ROW_BYTES], [0, -1]])
def test_a_row_that_is_not_there_ends_the_stream_of_its_reader_only(tmp_path: Path, rows: list[int]) -> None:
    async def scenario(path: str) -> None:
        other = ArenaReader(path)
        with pytest.raises(ConnectionError):
            await read(ArenaReader(path), rows)

        assert np.array_equal(await read(other, [1]), CONTENT[None, ROW_BYTES : 2 * ROW_BYTES])

    check_reads(tmp_path, scenario)


def test_a_request_beyond_the_limit_ends_the_stream(tmp_path: Path) -> None:
    async def scenario(path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(HEADER.pack(MAX_READ_BYTES, 2))

        assert await reader.read() == b""

    check_reads(tmp_path, scenario)


def test_there_is_nothing_to_read_if_requests_have_no_images(tmp_path: Path) -> None:
    async def scenario(path: str) -> None:
        with pytest.raises(ConnectionError):
            await read(ArenaReader(path), [0])

    check_reads(tmp_path, scenario, has_images=False)
