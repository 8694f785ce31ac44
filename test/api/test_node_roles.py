"""Prefill and decode engines whose ranks are on several nodes (--nnodes, --role): each rank sends its own KV to the
rank of the other engine, and whatever dies, the text is that of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from test.api.nodes import Nodes, nodes_in
from test.api.server import ServerProcess, running_server
from test.api.test_disaggregation import PROMPT_TOKENS, bodies, serve
from test.api.test_dp import BACK_S
from test.api.test_engines import serving
from test.api.test_nodes import namespace  # noqa: F401  # a fixture
from test.api.test_restart import clients_of, kill_worker
from test.ports import free_port
from test.small_text import save_small_model
from test.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.tp, pytest.mark.long]

FLAGS = ("--device", "cpu", "--deterministic", "--max_total_token_num", "16384", "--batch_max_tokens", "256")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_small_model(tmp_path_factory.mktemp("model"), context_len=4096))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What one rank answers in each round."""
    with serve(model, tmp_path_factory.mktemp("one") / "log") as server, clients_of(server) as clients:
        return [[answer.result() for answer in clients.ask(bodies(round_))] for round_ in range(3)]


@dataclass
class Engine:
    """Of two nodes, with a pipeline stage each."""

    nodes: Nodes
    first: ServerProcess
    other: ServerProcess


@dataclass
class TwoEngines:
    gateway: ServerProcess
    prefill: Engine
    decode: Engine

    def logs(self) -> str:
        return "\n".join([self.gateway.log, self.prefill.nodes.logs(), self.decode.nodes.logs()])


@contextmanager
def two_engines(
    folder: Path, model: Path, address: str = "127.0.0.1", prefix: list[str] | None = None
) -> Iterator[Any]:
    """``prefix``: of the command of each engine's second node."""
    listen = {role: f"tcp://{address}:{free_port()}" for role in ("prefill", "decode")}
    flags = {role: (*FLAGS, "--model_dir", str(model), "--pp", "2", "--role", role) for role in listen}
    with (
        nodes_in(folder / "prefill", 2, *flags["prefill"], "--listen", listen["prefill"], address=address) as prefill,
        nodes_in(folder / "decode", 2, *flags["decode"], "--listen", listen["decode"], address=address) as decode,
    ):
        engines = []
        for nodes in (prefill, decode):
            nodes.prefixes[1] = prefix or []
            other, first = nodes.start(1, keys=prefill.keys), nodes.start(0, keys=prefill.keys)
            engines.append(Engine(nodes, first, other))
        remote = ("--engines", ",".join(listen.values()), "--cluster_keys", str(prefill.keys))
        least = ("--min_remote_prefill_tokens", "128")
        with running_server(folder / "log", "--model_dir", str(model), *remote, *least) as gateway:
            found = TwoEngines(gateway, *engines)
            wait_until(lambda: serving(gateway) == 2, BACK_S)
            yield found


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoEngines]:
    with two_engines(tmp_path_factory.mktemp("nodes"), model) as engines:
        yield engines


def check_kv_was_sent(engines: TwoEngines) -> None:
    metrics = engines.gateway.settled_metrics()
    assert metrics["kv_transfer_received_tokens_total"] >= PROMPT_TOKENS // 64 * 64, engines.logs()
    assert metrics["kv_transfer_sent_tokens_total"] == metrics["kv_transfer_received_tokens_total"]
    assert metrics["kv_transfer_given_up_tokens_total"] == metrics["kv_transfer_recomputed_tokens_total"] == 0


def test_ranks_on_two_nodes_send_their_kv_to_ranks_on_two_nodes(engines: TwoEngines, expected: list[list[Any]]) -> None:
    with clients_of(engines.gateway) as clients:
        found = [answer.result() for answer in clients.ask(bodies(0))]

    assert found == expected[0], engines.logs()
    check_kv_was_sent(engines)


@pytest.mark.parametrize(("round_", "role"), [(1, "decode"), (2, "prefill")])
def test_a_rank_that_dies_on_another_node_changes_no_text(
    engines: TwoEngines, expected: list[list[Any]], round_: int, role: str
) -> None:
    engine = engines.decode if role == "decode" else engines.prefill
    with clients_of(engines.gateway) as clients:
        asked = clients.ask(bodies(round_))
        wait_until(lambda: clients.events > 20)

        kill_worker(engine.other, "ls-worker-1")
        found = [answer.result() for answer in asked]

    assert found == expected[round_], engines.logs()
    engine.first.wait_for_log("model worker 1 on node 1 died (signal 9); restarting the workers")
    wait_until(lambda: serving(engines.gateway) == 2, BACK_S)
    before = engines.gateway.settled_metrics()["kv_transfer_received_tokens_total"]
    with clients_of(engines.gateway) as clients:
        again = [answer.result() for answer in clients.ask([body | {"cache_salt": role} for body in bodies(0)])]
    assert again == expected[0], engines.logs()
    assert engines.gateway.settled_metrics()["kv_transfer_received_tokens_total"] > before  # of the new ranks


def test_ranks_on_nodes_with_different_addresses_send_each_other_kv(
    model: Path,
    expected: list[list[Any]],
    tmp_path: Path,
    namespace: str,  # noqa: F811
) -> None:
    prefix = ["ip", "netns", "exec", namespace]
    with two_engines(tmp_path, model, "10.213.7.1", prefix) as engines:
        with clients_of(engines.gateway) as clients:
            found = [answer.result() for answer in clients.ask(bodies(0))]

        assert found == expected[0], engines.logs()
        check_kv_was_sent(engines)  # of both stages, or it would not count
