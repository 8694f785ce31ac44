"""No process of the server remembers what clients choose: its memory does not grow with hostile requests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from test.api.hostile_bodies import HOSTILE, send
from test.api.server import ServerProcess, running_server
from test.api.test_faults import COMPLETE, Client

pytestmark = pytest.mark.slow

LENGTH = 2**19  # characters of a text, if the server takes so many
MIB = 2**20
WARM_UP, SENT, SENT_LONG = 8 * MIB, 32 * MIB, 320 * MIB  # bytes of requests
MAX_GROWTH = 16 * MIB  # a process that remembers them grows by SENT or more; allocators keep some of what was freed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--null_worker", "--null_step_ms", "0", "--httpserver_workers", "1", "--disable_log_requests")
    with running_server(tmp_path_factory.mktemp("hostile") / "log", *flags) as server:
        server.post(COMPLETE, {"prompt": [1, 2], "max_tokens": 1, "guided_regex": "a"})  # ls-grammar has then started
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Client:
    return Client(server)


def memory(server: ServerProcess) -> dict[str, int]:
    return {name: sum(one.memory_info().rss for one in found) for name, found in server.processes().items()}


def send_bytes(client: Client, kind: str, numbers: Iterator[int], total: int) -> None:
    while total > 0:
        status, size = send(client, kind, next(numbers), LENGTH)
        assert status < 500
        total -= size


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("sent", [SENT, pytest.param(SENT_LONG, marks=pytest.mark.long)])
def test_memory_does_not_grow_with_what_clients_choose(
    server: ServerProcess, client: Client, kind: str, sent: int
) -> None:
    numbers = count(sent)  # the long variant has other texts
    send_bytes(client, kind, numbers, WARM_UP)
    before = memory(server)

    send_bytes(client, kind, numbers, sent)

    growth = {name: used - before[name] for name, used in memory(server).items()}
    assert {name: used // MIB for name, used in growth.items() if used > MAX_GROWTH} == {}
    assert client.send("GET", "/health")[0] == 200
