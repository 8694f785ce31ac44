"""How a worker serves the connections of a router: each says which call it is for."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rpyc.core import Channel, SocketStream
from rpyc.utils.factory import connect_channel

from lightserve.ipc.codec import encode
from lightserve.ipc.worker_calls import RUN, WorkerCall, same_reply
from lightserve.messages.step import Step, StepResult, StepRow, Token, TokenOut
from lightserve.worker.rpc import GetResult, StepServer, handler
from test.waiting import DEADLINE_S

UPPER: WorkerCall[str, str] = WorkerCall("upper", str, str, same_reply)
LENGTH: WorkerCall[str, int] = WorkerCall("length", str, int, same_reply)
STEP = Step([StepRow(1, [5])])


def launch(step: Step) -> GetResult:
    return partial(StepResult, [TokenOut(row.req_id, Token(int(row.slots[0]))) for row in step.rows])


@contextmanager
def serving(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "worker")
    handlers = [handler(UPPER, str.upper), handler(LENGTH, len)]
    thread = threading.Thread(target=StepServer(path).serve, args=(launch, 2, handlers), daemon=True)
    thread.start()
    yield path
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def open_socket(path: str) -> Any:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(DEADLINE_S)
    sock.connect(path)
    return connect_channel(Channel(SocketStream(sock), compress=False), config={"sync_request_timeout": DEADLINE_S})


def connect_all(path: str, names: Sequence[str]) -> dict[str, Any]:
    connections = {}
    for name in names:
        connections[name] = open_socket(path)
        assert set(connections[name].root.connect(name)) == {"run", "upper", "length"}
    return connections


@pytest.mark.parametrize("names", list(itertools.permutations(["run", "upper", "length"])), ids="-".join)
def test_connections_may_be_opened_in_any_order(tmp_path: Path, names: Sequence[str]) -> None:
    with serving(tmp_path) as path:
        connections = connect_all(path, names)

        assert UPPER.decode_reply(connections["upper"].root.call(encode("é"))) == "É"
        assert LENGTH.decode_reply(connections["length"].root.call(encode("abc"))) == 3
        result = RUN.decode_reply(connections["run"].root.call(encode(STEP)))
        assert [out.token.id for out in result.tokens] == [5]
        for connection in connections.values():
            connection.close()


def test_an_unknown_call_is_refused_and_the_connection_may_name_another(tmp_path: Path) -> None:
    with serving(tmp_path) as path:
        connection = open_socket(path)

        assert connection.root.connect("lower") == "there is no call 'lower'; there are run, upper, length"
        assert connection.root.call(encode("a")) == "the connection has named no call"
        assert connection.root.connect("run") == ("run", "upper", "length")
        connection.close()


def test_a_call_has_one_connection(tmp_path: Path) -> None:
    with serving(tmp_path) as path:
        first, second = open_socket(path), open_socket(path)
        first.root.connect("run")

        assert second.root.connect("run") == "the call 'run' has a connection already"
        second.close()
        assert RUN.decode_reply(first.root.call(encode(STEP))).tokens
        first.close()


def test_a_connection_that_says_nothing_does_not_keep_others_waiting(tmp_path: Path) -> None:
    with serving(tmp_path) as path, socket.socket(socket.AF_UNIX) as silent:
        silent.connect(path)
        connections = connect_all(path, ["upper", "run"])

        assert UPPER.decode_reply(connections["upper"].root.call(encode("a"))) == "A"
        for connection in connections.values():
            connection.close()
