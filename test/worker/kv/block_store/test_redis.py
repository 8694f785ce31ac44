"""Blocks of KV in Redis: what is read is what was written, or an error, and nobody waits for a server that is down."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightserve.config import WorkerConfig
from lightserve.errors import OptionError
from lightserve.utils.net import RedisAddress, parse_redis
from lightserve.worker.kv.offload.block_store import redis
from lightserve.worker.kv.offload.block_store.frame import BlockError
from lightserve.worker.kv.offload.block_store.redis import Connection, RedisStore
from test.ports import free_port
from test.worker.kv.block_store.redis_server import redis_server
from test.worker.kv.block_store.test_disk import IDENTITY, SIZE, content, key


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis"), "--requirepass", "secret word") as address:
        yield address


@pytest.fixture
def store(address: str) -> RedisStore:
    store = RedisStore(f"redis://:secret%20word@{address}/3", IDENTITY)
    for number in range(10):
        store.remove(key(number))
    return store


def read(store: RedisStore, number: int) -> bytes:
    into = memoryview(bytearray(SIZE))
    store.get(key(number), into)
    return bytes(into)


def overwrite(store: RedisStore, number: int, data: bytes) -> None:
    connection = Connection(store._address)
    connection.send(b"SET", store._name(key(number)), data)
    assert connection.read_line() == b"+OK"
    connection.close()


def stored(store: RedisStore, number: int) -> bytes:
    connection = Connection(store._address)
    connection.send(b"GET", store._name(key(number)))
    data = bytearray(int(connection.read_line()[1:]))
    connection.read_exactly(memoryview(data))
    connection.close()
    return bytes(data)


def test_a_block_is_found_over_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with redis_server(tmp_path, "--unixsocket", str(path)):
        store = RedisStore(f"unix://{path}", IDENTITY)
        store.put(key(1), memoryview(content(1)))

        assert read(RedisStore(f"unix://{path}", IDENTITY), 1) == bytes(content(1))


def test_a_block_is_found_by_another_client(address: str, store: RedisStore) -> None:
    assert store.put(key(1), content(1))
    assert not store.put(key(1), content(1)), "it is there already"

    other = RedisStore(f"redis://default:secret%20word@{address}/3", IDENTITY)

    assert other.find([key(1), key(2)]) == [True, False]
    assert read(other, 1) == content(1)
    assert RedisStore(f"redis://:secret%20word@{address}", IDENTITY).find([key(1)]) == [False], "another database"


def test_large_blocks_are_sent_and_received_whole(store: RedisStore) -> None:
    data = memoryview(bytearray(random.Random(0).randbytes(20_000_000)))
    store.put(key(1), data)
    into = memoryview(bytearray(len(data)))

    store.get(key(1), into)

    assert into == data


def test_damaged_blocks_are_errors_and_removed(store: RedisStore) -> None:
    rng = random.Random(0)
    for _ in range(100):
        store.put(key(1), content(1))
        data = bytearray(stored(store, 1))
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        overwrite(store, 1, bytes(data) if rng.random() < 0.5 else bytes(data)[: rng.randrange(len(data))])

        with pytest.raises(BlockError):
            read(store, 1)

        assert store.find([key(1)]) == [False]


def test_the_block_of_another_key_is_an_error(store: RedisStore) -> None:
    store.put(key(1), content(1))
    overwrite(store, 2, stored(store, 1))

    with pytest.raises(BlockError):
        read(store, 2)


def test_a_missing_block_is_an_error_and_the_server_is_asked_again(store: RedisStore) -> None:
    with pytest.raises(BlockError, match="not there"):
        read(store, 1)
    store.put(key(1), content(1))

    assert read(store, 1) == content(1)


def test_a_wrong_password_is_an_error(address: str) -> None:
    with pytest.raises(BlockError, match="WRONGPASS"):
        RedisStore(f"redis://:other@{address}", IDENTITY).put(key(1), content(1))


def test_a_server_that_is_down_is_left_alone_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RedisStore(f"redis://127.0.0.1:{free_port()}", IDENTITY)
    assert store.find([key(1)]) == [False]

    with pytest.raises(BlockError, match="failed less than"):
        store.put(key(1), content(1))

    with redis_server(tmp_path) as address:
        store._address = parse_redis(f"redis://{address}")
        monkeypatch.setattr(redis, "RETRY_S", 0.0)
        assert store.put(key(1), content(1))


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 10_000, b"$99999999999\r\nabc", b""])
def test_nonsense_is_an_error(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                connection.recv(1000)
                connection.sendall(reply)

        threading.Thread(target=serve, daemon=True).start()
        store = RedisStore(f"redis://127.0.0.1:{listener.getsockname()[1]}", IDENTITY)

        begin = time.monotonic()
        with pytest.raises(BlockError):
            read(store, 1)
        assert store.find([key(1)]) == [False]
        assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host", RedisAddress("host")),
        ("redis://host:7/2", RedisAddress("host", 7, 2)),
        ("rediss://a:b%40c@[::1]/", RedisAddress("::1", user="a", password="b@c", has_tls=True)),
        ("unix:///run/a%20b.sock", RedisAddress("localhost", socket_path="/run/a b.sock")),
    ],
)
def test_addresses(url: str, expected: RedisAddress) -> None:
    assert parse_redis(url) == expected


@pytest.mark.parametrize(
    "url", ["", "host:6379", "http://host", "redis://", "redis://host/x", "redis://host:x", "unix://x"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="kv_remote"):
        WorkerConfig(kv_ram_gb=1, kv_remote=url)


def test_a_remote_tier_needs_host_memory() -> None:
    with pytest.raises(OptionError, match="the KV tier remote needs --kv_ram_gb"):
        WorkerConfig(kv_remote="redis://host")
