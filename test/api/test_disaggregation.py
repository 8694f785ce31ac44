"""One prefill engine and two decode engines behind one port: the same text as one engine, whatever dies."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lightserve.links.keys import generate
from test.api.server import STOP_S, ServerProcess, running_server, start_server
from test.api.test_dp import BACK_S, get
from test.api.test_engines import CLI, serving
from test.api.test_restart import KINDS, clients_of
from test.hybrid_model import save_hybrid_model
from test.ports import free_port
from test.waiting import wait_until
from test.worker.kv.test_kv_transfer import NEEDS
from test.worker.kv.test_windowed_pool import (
    make as make_windowed,
    prompt as windowed_prompt,
    save_model as save_windowed_model,
)

pytestmark = pytest.mark.slow

PROMPT_TOKENS = 600
KV_TOKENS = "16384"
DISAGGREGATED = ("--dp", "3", "--roles", "prefill,decode,decode", "--min_remote_prefill_tokens", "128")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose context has room for long prompts."""
    from test.small_text import save_small_model  # here, because it imports transformers

    return Path(save_small_model(tmp_path_factory.mktemp("model"), context_len=4096))


def serve(folder: Path, log: Path, *flags: str) -> Any:
    common = ("--deterministic", "--max_total_token_num", KV_TOKENS, "--batch_max_tokens", "256")
    return running_server(log, "--model_dir", str(folder), *common, *flags)


TRANSPORTS = ["sockets", *(pytest.param(name, marks=[mark, pytest.mark.long]) for name, mark in NEEDS.items())]


@pytest.fixture(scope="module", params=TRANSPORTS)
def disaggregated(
    model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("split") / "log"
    with serve(model, log, *DISAGGREGATED, "--kv_transport", request.param) as server:
        yield server


def bodies(round_: int) -> list[dict[str, Any]]:
    """Every kind of sampling, with prompts that no earlier round has cached."""
    return [
        {"prompt": prompt(round_, number), "max_tokens": 60, "ignore_eos": True, "stream": True} | kind
        for number, kind in enumerate(KINDS)
    ]


def prompt(round_: int, number: int) -> list[int]:
    return [(round_ * 7 + number * 3 + i * i) % 40 for i in range(PROMPT_TOKENS + number)]


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The responses of a single engine in each round."""
    with serve(model, tmp_path_factory.mktemp("one") / "log") as server, clients_of(server) as clients:
        return [[answer.result() for answer in clients.ask(bodies(round_))] for round_ in range(4)]


def stop_prefill(server: ServerProcess) -> Any:
    """The worker of the prefill engine hangs, so that requests wait for its KV."""
    worker = server.processes()["ls-worker"][0]
    worker.send_signal(signal.SIGSTOP)
    return worker


def kill(server: ServerProcess, name: str) -> None:
    server.processes()[name][0].send_signal(signal.SIGKILL)


def wait_until_kv_is_wanted(server: ServerProcess, least: int) -> None:
    def wanted() -> int:
        ids = [one["request_id"] for one in get(server, "/debug/requests")["requests"] if one["state"] == "waiting"]
        sequences = [one for name in dict.fromkeys(ids) for one in get(server, f"/debug/requests/{name}")["sequences"]]
        return sum(any(event["event"] == "kv_wanted" for event in one["events"]) for one in sequences)

    wait_until(lambda: wanted() >= least)


def wait_until_decode_engine_waits(server: ServerProcess) -> str:
    """The number of a decode engine that has waiting requests. One may have got them all."""
    waiting = re.compile(r'^lightserve_dp_requests_waiting\{.*engine="([12])".*\} [1-9]', flags=re.MULTILINE)
    numbers: list[str] = []

    def has_waiting() -> bool:
        numbers[:] = waiting.findall(server.metrics_text())
        return bool(numbers)

    wait_until(has_waiting)
    return numbers[0]


def wait_until_all_serve(server: ServerProcess) -> None:
    wait_until(lambda: serving(server) == 3, BACK_S)


def test_text_is_that_of_one_engine_and_the_prefill_engine_computes_prompts(
    disaggregated: ServerProcess, expected: list[list[Any]]
) -> None:
    with clients_of(disaggregated) as clients:
        found = [answer.result() for answer in clients.ask(bodies(0))]

    assert found == expected[0]
    metrics = disaggregated.settled_metrics()
    assert metrics["kv_transfer_received_tokens_total"] >= PROMPT_TOKENS // 64 * 64  # more, if they do not queue there
    assert metrics["kv_transfer_sent_tokens_total"] == metrics["kv_transfer_received_tokens_total"]
    assert metrics["kv_transfer_given_up_tokens_total"] == metrics["kv_transfer_recomputed_tokens_total"] == 0
    assert metrics["num_requests_running"] == metrics["kv_used_tokens"] == 0


def test_the_timeline_of_a_request_shows_both_engines(disaggregated: ServerProcess) -> None:
    body = {"prompt": prompt(9, 0), "max_tokens": 4, "temperature": 0}

    status, _ = disaggregated.post("/v1/completions", body, **{"X-Request-Id": "both"})

    assert status == 200
    (sequence,) = get(disaggregated, "/debug/requests/both")["sequences"]
    kinds = [event["event"] for event in sequence["events"]]
    assert kinds[:2] == ["queued", "kv_wanted"]
    assert kinds[2:5] == ["prefill"] * 3  # of at most 256 tokens each
    assert kinds[5:7] == ["kv_received", "admitted"]
    assert sequence["cached_tokens"] == 576
    assert sequence["prompt_tokens"] == PROMPT_TOKENS
    assert sequence["max_new_tokens"] == sequence["output_tokens"] == 4


def test_a_prompt_that_the_decode_engine_has_makes_no_trip(disaggregated: ServerProcess) -> None:
    body = {"prompt": prompt(10, 0), "max_tokens": 4, "temperature": 0}
    answers = [disaggregated.post("/v1/completions", body)[1]["choices"]]
    before = disaggregated.settled_metrics()["kv_transfer_sent_tokens_total"]

    answers.append(disaggregated.post("/v1/completions", body)[1]["choices"])

    assert answers[0] == answers[1]
    assert disaggregated.settled_metrics()["kv_transfer_sent_tokens_total"] == before


def test_a_prefill_engine_that_dies_while_it_computes_changes_no_text(
    disaggregated: ServerProcess, expected: list[list[Any]]
) -> None:
    stop_prefill(disaggregated)
    with clients_of(disaggregated) as clients:
        asked = clients.ask(bodies(1))
        wait_until_kv_is_wanted(disaggregated, 3)

        kill(disaggregated, "ls-worker")
        found = [answer.result() for answer in asked]

    assert found == expected[1]
    assert disaggregated.settled_metrics()["kv_transfer_given_up_tokens_total"] > 0
    wait_until_all_serve(disaggregated)


def test_a_decode_engine_that_dies_while_it_waits_for_kv_changes_no_text(
    disaggregated: ServerProcess, expected: list[list[Any]]
) -> None:
    prefill = stop_prefill(disaggregated)
    with clients_of(disaggregated) as clients:
        asked = clients.ask(bodies(2))
        wait_until_kv_is_wanted(disaggregated, 5)

        kill(disaggregated, f"ls-router-{wait_until_decode_engine_waits(disaggregated)}")
        prefill.send_signal(signal.SIGCONT)
        found = [answer.result() for answer in asked]

    assert found == expected[2]
    wait_until(lambda: disaggregated.metrics()["dp_requests_moved_total"] > 0)
    wait_until_all_serve(disaggregated)


@pytest.mark.long
def test_a_decode_worker_that_dies_while_it_generates_changes_no_text(
    disaggregated: ServerProcess, expected: list[list[Any]]
) -> None:
    with clients_of(disaggregated) as clients:
        asked = clients.ask(bodies(3))
        wait_until(lambda: clients.events > 40)

        kill(disaggregated, "ls-worker-2")
        found = [answer.result() for answer in asked]

    assert found == expected[3]
    wait_until_all_serve(disaggregated)
    metrics = disaggregated.settled_metrics()
    assert metrics["request_failed_total"] == metrics["num_requests_running"] == metrics["kv_used_tokens"] == 0


@pytest.mark.long
@pytest.mark.parametrize("flag", ["--tp", "--pp"])
def test_every_rank_sends_its_part(model: Path, tmp_path: Path, expected: list[list[Any]], flag: str) -> None:
    disaggregated = ("--dp", "2", "--roles", "prefill,decode", "--min_remote_prefill_tokens", "128", flag, "2")
    with serve(model, tmp_path / "log", *disaggregated) as server, clients_of(server) as clients:
        found = [answer.result() for answer in clients.ask(bodies(0))]
        metrics = server.settled_metrics()

    assert found == expected[0]
    assert metrics["kv_transfer_received_tokens_total"] >= PROMPT_TOKENS // 64 * 64
    assert metrics["kv_transfer_given_up_tokens_total"] == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("secrets", "encryption"),
    [
        ("equal", []),
        ("different", []),
        ("equal", ["--cluster_tls"]),
        *(
            pytest.param("equal", ["--cluster_tls", "--kv_transport", name], marks=mark, id=name)
            for name, mark in NEEDS.items()
        ),
    ],
)
def test_engines_of_a_gateway_send_kv_over_tcp_if_they_know_each_other(
    model: Path, tmp_path: Path, expected: list[list[Any]], secrets: str, encryption: list[str]
) -> None:
    """Without the same kv.secret, the decode engine computes all prompts itself."""
    generate(tmp_path / "keys")
    shutil.copytree(tmp_path / "keys", tmp_path / "other")
    if secrets == "different":
        (tmp_path / "other" / "kv.secret").write_text("x" * 40)
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    kv = f"tcp://127.0.0.1:{free_port()}"
    flags = ["--deterministic", "--max_total_token_num", KV_TOKENS, "--batch_max_tokens", "256", *encryption]
    engines = [
        ["--listen", addresses[0], "--cluster_keys", str(tmp_path / "keys"), "--run_mode", "prefill"],
        ["--listen", addresses[1], "--cluster_keys", str(tmp_path / "other"), "--role", "decode", "--kv_listen", kv],
    ]
    gateway = [
        "--engines",
        ",".join(addresses),
        "--cluster_keys",
        str(tmp_path / "keys"),
        "--min_remote_prefill_tokens",
        "128",
    ]
    with ExitStack() as running:
        for number, own in enumerate(engines):
            command = [*CLI, "engine", str(model), *flags, *own]
            engine = start_server(tmp_path / f"engine-{number}.log", command)
            running.callback(end, engine)
        server = running.enter_context(running_server(tmp_path / "log", "--model_dir", str(model), *gateway))
        wait_until(lambda: serving(server) == 2, BACK_S)
        with clients_of(server) as clients:
            found = [answer.result() for answer in clients.ask(bodies(0))]
        metrics = server.settled_metrics()

    assert found == expected[0]
    if secrets == "equal":
        assert metrics["kv_transfer_given_up_tokens_total"] == 0
        assert metrics["kv_transfer_received_tokens_total"] > 0
    else:
        assert metrics["kv_transfer_received_tokens_total"] == 0
        assert "another kv.secret" in (tmp_path / "engine-1.log").read_text()


def end(server: ServerProcess) -> None:
    server.process.kill()  # its child processes exit too
    server.process.wait(STOP_S)


def windowed(folder: Path) -> tuple[str, tuple[str, ...], str]:
    """The model, flags of its KV group, and the name of the group in metrics."""
    return save_windowed_model("gemma3_text", folder), ("--max_windowed_token_num", "1000"), "sliding_window_16"


def recurrent(folder: Path) -> tuple[str, tuple[str, ...], str]:
    return save_hybrid_model(folder)[0], ("--max_state_rows", "40"), "state"


@pytest.mark.tp
@pytest.mark.parametrize("make_model", [windowed, recurrent])
def test_kv_groups_of_prompts_come_with_their_kv_also_if_the_prefill_worker_dies(
    tmp_path: Path, make_model: Callable[[Path], tuple[str, tuple[str, ...], str]]
) -> None:
    folder, group_flags, group = make_model(tmp_path)
    prompts = [windowed_prompt(300 + number, seed=number) for number in range(6)]
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    texts = [one.text for one in make_windowed(folder, 0).generate(prompts * 2, **options)]
    requests = [
        {"prompt": ids, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True} for ids in prompts
    ]
    flags = ("--dp", "2", "--roles", "prefill,decode", "--min_remote_prefill_tokens", "128")
    pools = ("--max_total_token_num", "4096", "--dtype", "float32", *group_flags)

    with running_server(tmp_path / "log", "--model_dir", folder, "--device", "cpu", *pools, *flags) as server:
        with clients_of(server) as clients:
            found = [answer.result()[0]["text"] for answer in clients.ask(requests)]
        received = server.settled_metrics()["kv_transfer_received_tokens_total"]
        stop_prefill(server)
        with clients_of(server) as clients:
            asked = clients.ask([body | {"cache_salt": "again"} for body in requests])
            wait_until_kv_is_wanted(server, 1)
            kill(server, "ls-worker")
            found += [answer.result()[0]["text"] for answer in asked]

        assert found == texts
        assert received >= 256
        metrics = server.settled_metrics()
        assert metrics["kv_transfer_given_up_tokens_total"] > 0
        assert metrics["kv_transfer_recomputed_tokens_total"] == metrics["kv_used_tokens"] == 0
        assert metrics[f"kv_group_used_slots/{group}"] == 0
