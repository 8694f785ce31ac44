"""A server on two nodes (--nnodes), each of which dies, hangs or is not what it should be. Workers have no model."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

from lightserve.links.keys import generate
from test.api.server import STOP_S, ServerProcess
from test.api.test_faults import Client
from test.faults.harness import Stream
from test.faults.start_case import Start, StartCase
from test.ports import free_port
from test.waiting import wait_until

RESTART_S = 120.0
SHORT_WAIT = ("--node_timeout", "4")
TOKENS = 400  # of 5 ms each: some seconds


class TwoNodes:
    def __init__(self, start: Start) -> None:
        self._start = start
        self.keys = start.base / "keys"
        generate(self.keys)
        self.port = free_port()
        self.other: ServerProcess
        self.first: ServerProcess

    def launch(self, node: int, *flags: str, keys: Path | None = None) -> ServerProcess:
        place = ("--nnodes", "2", "--master_addr", "127.0.0.1", "--master_port", str(self.port))
        common = ("--tp", "2", "--null_step_ms", "5", "--cluster_keys", str(keys or self.keys), *place)
        server = self._start.launch("--node_rank", str(node), *common, *flags)
        if node:
            self.other = server
        else:
            self.first = server
        return server

    def launch_both(self) -> None:
        self.launch(1)
        self.launch(0)
        self._start.check_serves(self.first)

    def streams(self) -> list[Stream]:
        """Some that have begun."""
        client = Client(self.first)
        bodies = [{"prompt": [1000 + 200 * index] * 3, "max_tokens": TOKENS} for index in range(4)]
        streams = [Stream(client, body) for body in bodies]
        for stream in streams:
            stream.read_events(3)
        client.close()
        return streams

    def check_same_text(self, broken: list[Stream]) -> None:
        for stream in broken:
            stream.read_all()
            assert stream.is_complete, stream.seen[-500:]
        for stream, other in zip(broken, self.streams(), strict=True):
            other.read_all()
            assert stream.text == other.text

    def stop(self) -> None:
        assert self.first.stop() == 0
        assert self.other.stop() == 0


def rank_killed(start: Start) -> None:
    nodes = TwoNodes(start)
    nodes.launch_both()
    streams = nodes.streams()
    nodes.other.processes()["ls-worker-1"][0].kill()
    nodes.check_same_text(streams)
    nodes.first.wait_for_log("model worker 1 on node 1 died (signal 9); restarting the workers")
    nodes.stop()


def profiled_rank_killed(start: Start) -> None:
    nodes = TwoNodes(start)
    folder = ("--profile_dir", str(start.base / "profiles"))
    nodes.launch(1, *folder)
    nodes.launch(0, *folder)
    start.check_serves(nodes.first)
    assert nodes.first.post("/start_profile", {"max_seconds": 60})[0] == 200
    streams = nodes.streams()
    nodes.other.processes()["ls-worker-1"][0].kill()
    nodes.check_same_text(streams)
    status, profile = nodes.first.post("/stop_profile", {})
    assert status == 200
    assert "was started after the profile" in profile["missing"], profile
    assert nodes.first.post("/start_profile", {"max_seconds": 60})[0] == 200
    start.check_serves(nodes.first)
    assert nodes.first.post("/stop_profile", {})[1]["missing"] is None
    assert len(list((start.base / "profiles").iterdir())) == 2  # of both profiles, and no parts
    nodes.stop()


def node_killed(start: Start) -> None:
    nodes = TwoNodes(start)
    nodes.launch_both()
    streams = nodes.streams()
    nodes.other.process.kill()
    nodes.other.process.wait()
    nodes.launch(1)
    nodes.check_same_text(streams)
    nodes.first.wait_for_log("node 1 is lost")
    nodes.stop()


def node_of_engine_killed(start: Start) -> None:
    """Each node has a whole engine: that of node 0 goes on alone, until the node is back."""
    nodes, engines = TwoNodes(start), ("--tp", "1", "--dp", "2")
    nodes.launch(1, *engines)
    nodes.launch(0, *engines)
    start.check_serves(nodes.first)
    streams = nodes.streams()
    nodes.other.process.kill()
    nodes.other.process.wait()
    nodes.check_same_text(streams)
    restarts = nodes.first.metrics()["worker_restarts_total"]
    nodes.launch(1, *engines)
    wait_until(lambda: nodes.first.metrics()["worker_restarts_total"] > restarts, RESTART_S)
    nodes.check_same_text(nodes.streams())
    nodes.stop()


def node_stopped(start: Start) -> None:
    """Node 0 gives it up, and it joins again when it runs."""
    nodes = TwoNodes(start)
    nodes.launch_both()
    streams = nodes.streams()
    nodes.other.process.send_signal(signal.SIGSTOP)
    nodes.first.wait_for_log("node 1 is lost")
    nodes.other.process.send_signal(signal.SIGCONT)
    nodes.check_same_text(streams)
    nodes.stop()


def first_node_killed(start: Start) -> None:
    nodes = TwoNodes(start)
    nodes.launch_both()
    nodes.first.process.kill()
    wait_until(lambda: not nodes.other.processes(), RESTART_S)
    nodes.launch(0)
    start.check_serves(nodes.first)
    nodes.stop()


def node_missing(start: Start) -> None:
    first = TwoNodes(start).launch(0, *SHORT_WAIT)
    assert first.process.wait(RESTART_S) == 2
    assert "node 1 did not connect to 127.0.0.1" in first.log
    assert "within 4 s (--node_timeout); start it with --node_rank 1" in first.log


def node_not_back(start: Start) -> None:
    nodes = TwoNodes(start)
    nodes.launch(1)
    first = nodes.launch(0, *SHORT_WAIT)
    start.check_serves(first)
    assert nodes.other.stop() == 0
    assert first.process.wait(RESTART_S) == 1
    assert "node 1 did not connect to 127.0.0.1" in first.log
    assert first.log.count("restarting the workers") == 1


def first_node_missing(start: Start) -> None:
    other = TwoNodes(start).launch(1, *SHORT_WAIT)
    assert other.process.wait(RESTART_S) == 2
    assert "was not there for 4 s (--node_timeout): nothing listens there" in other.log


def wrong_key(start: Start) -> None:
    nodes = TwoNodes(start)
    generate(start.base / "other_keys")
    nodes.launch(0)
    stranger = nodes.launch(1, *SHORT_WAIT, keys=start.base / "other_keys")
    assert stranger.process.wait(RESTART_S) == 2
    assert "node 0 has another key (node.secret)" in stranger.log
    nodes.first.wait_for_log("refused a connection: it has another node.secret, or is no node of LightServe")
    nodes.launch(1)
    start.check_serves(nodes.first)
    nodes.stop()


def other_flags(start: Start) -> None:
    nodes = TwoNodes(start)
    nodes.launch(0)
    wrong = nodes.launch(1, "--max_req_total_len", "100")
    assert wrong.process.wait(RESTART_S) == 2
    found = "node 1 has other properties than node 0: --max_req_total_len is 100 there, and None on node 0"
    assert found in wrong.log
    nodes.first.wait_for_log(f"refused a node: {found}")
    nodes.launch(1)
    start.check_serves(nodes.first)
    nodes.stop()


def node_twice(start: Start) -> None:
    nodes = TwoNodes(start)
    nodes.launch_both()
    right = nodes.other
    second = nodes.launch(1, *SHORT_WAIT)
    assert second.process.wait(STOP_S) == 2
    assert "another process is connected as node 1 (--node_rank)" in second.log
    nodes.other = right
    start.check_serves(nodes.first)
    nodes.stop()


def strangers(start: Start) -> None:
    nodes = TwoNodes(start)
    nodes.launch_both()
    for noise in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" + bytes(8) + b"\x01\x7f" + bytes(1000),
        bytes(range(256)) * 99,
    ):
        with socket.create_connection(("127.0.0.1", nodes.port)) as sock:
            sock.sendall(noise)
    nodes.first.wait_for_log("refused a connection")
    start.check_serves(nodes.first)
    assert "is lost" not in nodes.first.log
    nodes.stop()


SAME_TEXT = "streams go on, same text"
CASES = [
    StartCase("a rank on another node is killed", rank_killed, SAME_TEXT, RESTART_S),
    StartCase(
        "a rank on another node is killed during a profile",
        profiled_rank_killed,
        f"{SAME_TEXT}; the profile says what is missing",
        RESTART_S,
    ),
    StartCase("a node is killed and started again", node_killed, SAME_TEXT, RESTART_S),
    StartCase(
        "a node with one of two engines is killed, and started later",
        node_of_engine_killed,
        "streams go on in the other engine, same text",
        RESTART_S,
    ),
    StartCase("a node is stopped, and goes on later", node_stopped, SAME_TEXT, RESTART_S),
    StartCase("node 0 is killed and started again", first_node_killed, "the other node serves it", RESTART_S),
    StartCase("a node never comes", node_missing, "one line after --node_timeout, exit code 2", RESTART_S),
    StartCase("a node does not come back", node_not_back, "one line after --node_timeout, exit code 1", RESTART_S),
    StartCase("node 0 never comes", first_node_missing, "one line after --node_timeout, exit code 2", RESTART_S),
    StartCase("a node with another key", wrong_key, "it is refused; the right one serves", RESTART_S),
    StartCase("a node with other flags", other_flags, "it is refused; the right one serves", RESTART_S),
    StartCase("two processes are the same node", node_twice, "the second one is refused", RESTART_S),
    StartCase("strangers at the port of node 0", strangers, "they are refused", RESTART_S),
]
