"""Prefill and decode engines of a gateway that do not fit each other, or cannot reach each other."""

from __future__ import annotations

import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from benchmark.models import TINY, save_model
from lightserve.links.keys import generate
from test.api.server import START_S, ServerProcess, start_server
from test.api.test_engines import serving
from test.faults.start_case import Start, StartCase
from test.ports import free_port
from test.waiting import wait_until

CLI = (sys.executable, "-m", "lightserve.cli.main")
WITHIN_S = 180.0
PROMPT_LEN = 600
TOKENS_OF_KILLED = 400  # its requests run when it is killed
SAME_TEXT = "requests go on, same text"


class Roles:
    """A gateway and its engines, each with processes of its own."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._keys = ("--cluster_keys", str(start.base / "keys"))
        generate(start.base / "keys")
        self._model = start.base / "model"
        self._model.mkdir()
        save_model(self._model, None, {**TINY, "num_hidden_layers": 2})
        self.addresses: list[str] = []
        self.engines: list[ServerProcess] = []
        self.gateway: ServerProcess

    def launch_engine(self, role: str, *flags: str) -> ServerProcess:
        self.addresses.append(f"tcp://127.0.0.1:{free_port()}")
        engine = self._launch_engine("--listen", self.addresses[-1], "--role", role, *flags)
        self.engines.append(engine)
        return engine

    def _launch_engine(self, *flags: str) -> ServerProcess:
        pool = ("--max_total_token_num", "16384", "--batch_max_tokens", "256")
        computed = ("--load_format", "dummy", "--deterministic", "--device", "cpu", *pool)
        return self._launch("engine", str(self._model), *computed, *self._keys, *flags)

    def launch_other_node(self, *flags: str) -> ServerProcess:
        """Of the engine that was launched last."""
        return self._launch_engine("--listen", self.addresses[-1], *flags)

    def launch_gateway(self) -> None:
        engines = ("--engines", ",".join(self.addresses), "--min_remote_prefill_tokens", "128", "--port", "0")
        self.gateway = self._launch("serve", str(self._model), *engines, *self._keys)
        self._start.wait_ready(self.gateway)
        wait_until(lambda: serving(self.gateway) == len(self.engines), START_S)

    def texts(self, max_tokens: int = 8) -> list[str]:
        """Of prompts that are computed at the same time."""
        bodies = [
            {"prompt": [(number + i * i) % 200 for i in range(PROMPT_LEN)], "max_tokens": max_tokens, "temperature": 0}
            for number in range(6)
        ]
        with ThreadPoolExecutor(len(bodies)) as clients:
            answers = list(clients.map(lambda body: self.gateway.post("/v1/completions", body), bodies))
        assert {status for status, _ in answers} == {200}, answers
        return [answer["choices"][0]["text"] for _, answer in answers]

    def check_serves(self) -> None:
        """The same text when nothing is missing any more, and no worker was replaced."""
        assert self.texts() == self.texts()
        assert not any("restarting" in engine.log for engine in self.engines)

    def stop(self) -> None:
        for server in (self.gateway, *self.engines):
            assert server.stop() == 0

    def _launch(self, *command: str) -> ServerProcess:
        log = self._start.base / f"log-{time.monotonic_ns()}-{command[0]}"
        server = start_server(log, [*CLI, *command], {"TMPDIR": str(self._start.base)})
        self._start.exits.callback(server.process.kill)
        return server


def other_ranks(start: Start) -> None:
    roles = Roles(start)
    roles.launch_engine("prefill", "--tp", "2")
    roles.launch_engine("decode")
    roles.launch_gateway()
    roles.check_serves()
    found = "engine 1 (decode) gets no KV from engine 0 (prefill), and computes prompts itself: --tp is 1 and 2"
    roles.gateway.wait_for_log(found)
    assert roles.gateway.settled_metrics()["kv_transfer_waited_tokens_total"] == 0
    roles.stop()


def swallowed_kv(start: Start) -> None:
    """Somebody else has taken the port where a decode engine receives KV, and never reads."""
    roles, path = Roles(start), start.base / "kv"
    roles.launch_engine("prefill")
    roles.launch_engine("decode")
    roles.launch_engine("decode", "--kv_listen", f"unix://{path}")
    roles.launch_gateway()
    os.unlink(path)
    with socket.socket(socket.AF_UNIX) as swallowing:
        swallowing.bind(str(path))
        swallowing.listen()
        roles.check_serves()
    roles.gateway.wait_for_log("KV of engine 0 has not come to engine 2 in time")
    assert roles.gateway.settled_metrics()["kv_transfer_received_tokens_total"] > 0
    roles.stop()


def rank_on_another_node_killed(start: Start) -> None:
    roles = Roles(start)
    place = ("--pp", "2", "--nnodes", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    roles.launch_engine("prefill", "--pp", "2")
    decode = roles.launch_engine("decode", *place)
    other = roles.launch_other_node("--role", "decode", *place, "--node_rank", "1")
    roles.launch_gateway()
    with ThreadPoolExecutor(1) as threads:
        broken = threads.submit(roles.texts, TOKENS_OF_KILLED)
        wait_until(lambda: roles.gateway.metrics()["kv_transfer_received_tokens_total"] > 0)
        other.processes()["ls-worker-1"][0].kill()
        texts = broken.result()
    decode.wait_for_log("model worker 1 on node 1 died (signal 9); restarting the workers")
    wait_until(lambda: serving(roles.gateway) == len(roles.engines), START_S)
    assert roles.texts(TOKENS_OF_KILLED) == texts
    roles.stop()
    assert other.stop() == 0


CASES = [
    StartCase("a prefill engine with more ranks", other_ranks, "decode engines compute prompts, at once", WITHIN_S),
    StartCase("a port for KV swallows packets", swallowed_kv, "that engine computes prompts, others get KV", WITHIN_S),
    StartCase("a decode rank on another node is killed", rank_on_another_node_killed, SAME_TEXT, WITHIN_S),
]
