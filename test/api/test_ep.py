"""Experts that are divided over ranks give the same text as one rank, through the server.

The ranks compute the attention of the same requests together, or each has requests of its own.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from safetensors.torch import save_file

from benchmark.make_adapters import target_sizes
from lightserve.offline.llm import LLM
from test.api.nodes import nodes_in
from test.api.server import RESPONSE_S, ServerProcess, running_server
from test.api.test_restart import kill_worker, restarted
from test.lora_files import write_adapter
from test.models.architectures.case import build
from test.models.architectures.cases import CASES
from test.pooling.files import word_tokenizer
from test.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.tp]

COMPLETE = "/v1/completions"
SAMPLING: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.7, "seed": 5}]
LENGTHS = (3, 90, 7, 40)  # of prompts: ranks with requests of their own compute different numbers of tokens
ADAPTERS = 4
FLAGS = ("--device", "cpu", "--max_total_token_num", "2048")
GROUPS = ("--tp", "2", "--ep", "2", "--enable_dp_attention")
JSON = {"Content-Type": "application/json"}
KV_USED = ("attention_group_kv_used_tokens/0", "attention_group_kv_used_tokens/1")


def save_expert_model(folder: Path) -> str:
    tiny = build(CASES["qwen3_moe"])
    (folder / "config.json").write_text(json.dumps(tiny.config_json))
    save_file(tiny.tensors, folder / "model.safetensors")
    return str(folder)


def body(number: int, length: int, **options: Any) -> dict[str, Any]:
    prompt = [(5 + number + 7 * i) % 131 for i in range(length)]
    return {"prompt": prompt, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True} | options


def bodies() -> list[dict[str, Any]]:
    return [body(i, length, **sampling) for i, length in enumerate(LENGTHS) for sampling in SAMPLING]


@dataclass
class Clients:
    """Streams of a server, and how many events they have received."""

    server: ServerProcess
    events: int = 0

    def open(self, request: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        place = urlsplit(self.server.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=RESPONSE_S)
        connection.request("POST", COMPLETE, json.dumps(request | {"stream": True}), JSON)
        return connection, connection.getresponse()

    def answer(self, request: dict[str, Any]) -> list[int]:
        _, response = self.open(request)
        tokens: list[int] = []
        for line in response:
            if line.startswith(b"data: {"):
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
                self.events += 1
        return tokens


def answers(server: ServerProcess, then: Callable[[], object] = lambda: None) -> list[list[int]]:
    """The tokens of eight requests at once. ``then``: what happens when each has some tokens on average."""
    clients = Clients(server)
    with ThreadPoolExecutor(len(bodies())) as threads:
        waiting = [threads.submit(clients.answer, request) for request in bodies()]
        wait_until(lambda: clients.events > 5 * len(waiting))
        then()
        return [one.result() for one in waiting]


def answers_although_killed(server: ServerProcess, worker: str) -> list[list[int]]:
    return answers(server, then=lambda: kill_worker(server, worker))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_expert_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def of_one_rank(model_dir: str) -> list[list[int]]:
    """What one rank answers. It needs no server."""
    llm = LLM(model_dir, device="cpu", max_total_token_num=2048)
    return [
        llm.generate([body(i, length)["prompt"]], max_new_tokens=60, ignore_eos=True, **sampling)[0].token_ids
        for i, length in enumerate(LENGTHS)
        for sampling in SAMPLING
    ]


@pytest.fixture(scope="module")
def adapters(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, sizes = tmp_path_factory.mktemp("adapters"), target_sizes(model_dir)
    for number in range(ADAPTERS):
        write_adapter(folder / f"a{number}", sizes, seed=number, strength=4.0)
    return folder


@pytest.fixture(scope="module")
def two_groups(model_dir: str, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("two")
    flags = (*FLAGS, "--model_dir", model_dir, *GROUPS, "--lora_dir", str(adapters), "--max_loras", "2")
    tiers = ("--kv_ram_gb", "0.05", "--kv_disk_gb", "0.1", "--kv_disk_dir", str(folder / "kv"))
    with running_server(folder / "log", *flags, *tiers) as server:
        yield server


def test_ranks_with_experts_of_their_own_give_the_text_of_one_rank(
    model_dir: str, of_one_rank: list[list[int]], tmp_path: Path
) -> None:
    with running_server(tmp_path / "ep", *FLAGS, "--model_dir", model_dir, "--tp", "2", "--ep", "2") as server:
        together = answers(server)

    assert [len(tokens) for tokens in of_one_rank] == [60] * 8
    assert together == of_one_rank


@pytest.mark.long  # a rank of an attention group dies below
def test_a_rank_with_experts_of_its_own_that_dies_is_replaced_and_no_text_changes(
    model_dir: str, of_one_rank: list[list[int]], tmp_path: Path
) -> None:
    with running_server(tmp_path / "ep", *FLAGS, "--model_dir", model_dir, "--tp", "2", "--ep", "2") as server:
        although_killed = answers_although_killed(server, "ls-worker-1")
        wait_until(restarted(server, 1))

    assert although_killed == of_one_rank


def test_ranks_with_requests_of_their_own_give_the_text_of_one_rank(
    two_groups: ServerProcess, of_one_rank: list[list[int]]
) -> None:
    before = two_groups.metrics()

    assert answers(two_groups) == of_one_rank
    assert "2 ranks in 2 attention groups" in two_groups.log
    assert {name for name in before if name.startswith("attention_group_kv")} == set(KV_USED)


def test_a_request_is_computed_while_the_other_group_has_none(
    two_groups: ServerProcess, of_one_rank: list[list[int]]
) -> None:
    alone = [Clients(two_groups).answer(request) for request in bodies()[:4]]

    assert alone == of_one_rank[:4]


def test_clients_that_leave_free_the_kv_of_their_groups_and_others_get_their_text(
    two_groups: ServerProcess, of_one_rank: list[list[int]]
) -> None:
    clients = Clients(two_groups)
    opened = [clients.open(body(number, 9, max_tokens=240, n=8)) for number in range(2)]
    for _, response in opened:
        assert response.readline().startswith(b"data: ")
    aborted = two_groups.metrics()["request_success_total/abort"]

    meanwhile = clients.answer(bodies()[0])
    for connection, response in opened:
        response.close()
        connection.close()

    wait_until(lambda: two_groups.metrics()["request_success_total/abort"] == aborted + 16)
    wait_until(lambda: all(two_groups.metrics()[name] == 0 for name in KV_USED))
    assert meanwhile == of_one_rank[0]


def test_a_prompt_finds_its_prefix_in_the_group_that_has_it(two_groups: ServerProcess) -> None:
    prompts = [body(100 + number, 150, temperature=0, max_tokens=4) for number in range(4)]

    first = [two_groups.post(COMPLETE, prompt)[1] for prompt in prompts]
    again = [two_groups.post(COMPLETE, prompt)[1] for prompt in prompts]

    cached = [response["usage"]["prompt_tokens_details"]["cached_tokens"] for response in again]
    assert cached == [149] * 4
    assert [one["choices"][0]["token_ids"] for one in again] == [one["choices"][0]["token_ids"] for one in first]


def test_a_rank_of_a_group_that_dies_is_replaced_with_the_others_and_no_text_changes(
    two_groups: ServerProcess, of_one_rank: list[list[int]]
) -> None:
    assert answers_although_killed(two_groups, "ls-worker-1") == of_one_rank

    wait_until(restarted(two_groups, 1))
    wait_until(lambda: two_groups.metrics()["kv_used_tokens"] == 0)


def test_adapters_give_the_text_of_one_rank_although_a_rank_of_a_group_dies(
    two_groups: ServerProcess, model_dir: str, adapters: Path
) -> None:
    """Each group has room for two of them at a time."""
    llm = LLM(model_dir, device="cpu", max_loras=1, max_total_token_num=2048)
    options: dict[str, Any] = {"temperature": 0.7, "seed": 5, "ignore_eos": True}
    prompt = body(0, 40)["prompt"]
    expected = [
        llm.generate([prompt], lora=str(adapters / f"a{number}"), max_new_tokens=60, **options)[0].token_ids
        for number in range(ADAPTERS)
    ]
    assert len(set(map(tuple, expected))) == ADAPTERS
    requests = [body(0, 40, model=f"a{number}", **options) for number in range(ADAPTERS)] * 2
    clients, restarts = Clients(two_groups), two_groups.metrics()["worker_restarts_total"]

    with ThreadPoolExecutor(len(requests)) as threads:
        waiting = [threads.submit(clients.answer, request) for request in requests]
        wait_until(lambda: clients.events > 2 * len(waiting))
        kill_worker(two_groups, "ls-worker-1")
        found = [one.result() for one in waiting]

    assert found == expected * 2
    wait_until(restarted(two_groups, int(restarts) + 1))


def test_prefixes_that_both_groups_evict_come_back_from_tiers_also_after_a_rank_died(
    two_groups: ServerProcess, model_dir: str
) -> None:
    """Each pool holds nine of these prompts."""
    llm = LLM(model_dir, device="cpu", max_total_token_num=2048)
    requests = [body(200 + number, 200, temperature=0, max_tokens=8) for number in range(26)]
    prompts = [request["prompt"] for request in requests]
    expected = [one.token_ids for one in llm.generate(prompts, temperature=0, max_new_tokens=8, ignore_eos=True)]

    def ask_all() -> list[list[int]]:
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(Clients(two_groups).answer, requests))

    def ask_until(tier: str) -> None:
        """On a loaded machine a load may be late, and the prompt is computed."""
        before = two_groups.settled_metrics()[f"kv_tier_hits_total/{tier}"]
        for _ in range(20):
            assert ask_all() == expected
            if two_groups.settled_metrics()[f"kv_tier_hits_total/{tier}"] > before + 256:
                return
        raise AssertionError(f"nothing came back from {tier}")

    ask_until("ram")
    restarts = two_groups.metrics()["worker_restarts_total"]
    kill_worker(two_groups, "ls-worker-1")
    ask_until("disk")

    wait_until(restarted(two_groups, int(restarts) + 1))
    assert two_groups.settled_metrics()["kv_tier_errors_total/disk"] == 0


@pytest.mark.long  # four workers; test_disaggregation.py has roles without groups
def test_groups_with_roles_give_the_text_of_one_rank_although_a_worker_dies(model_dir: str, tmp_path: Path) -> None:
    llm = LLM(model_dir, device="cpu", max_total_token_num=2048)
    requests = [body(number, 150 + number, temperature=0) for number in range(8)]
    prompts = [request["prompt"] for request in requests]
    expected = [one.token_ids for one in llm.generate(prompts, temperature=0, max_new_tokens=60, ignore_eos=True)]
    roles = ("--dp", "2", "--roles", "prefill,decode", "--min_remote_prefill_tokens", "64")
    with running_server(tmp_path / "log", *FLAGS, "--model_dir", model_dir, *GROUPS, *roles) as server:
        clients = Clients(server)
        with ThreadPoolExecutor(len(requests)) as threads:
            assert list(threads.map(clients.answer, requests)) == expected
            before = server.settled_metrics()
            events = clients.events
            waiting = [threads.submit(clients.answer, request | {"cache_salt": "again"}) for request in requests]
            wait_until(lambda: clients.events > events + 40)
            kill_worker(server, "ls-worker-1")
            assert [one.result() for one in waiting] == expected

        assert before["kv_transfer_received_tokens_total"] >= 64 * len(requests)
        assert before["kv_transfer_sent_tokens_total"] == before["kv_transfer_received_tokens_total"]
        assert before["kv_transfer_given_up_tokens_total"] == before["kv_transfer_recomputed_tokens_total"] == 0
        wait_until(lambda: server.metrics()["kv_used_tokens"] == 0)
        assert server.stop() == 0


@pytest.mark.long  # test_nodes.py has ranks of one group on two nodes
def test_groups_on_two_nodes_give_the_text_of_one_rank_although_the_other_node_is_killed(
    model_dir: str, of_one_rank: list[list[int]], tmp_path: Path
) -> None:
    with nodes_in(tmp_path, 2, *FLAGS, "--model_dir", model_dir, *GROUPS) as nodes:
        other, first = nodes.start(1), nodes.start(0)
        nodes.wait_ready(first)
        assert list(other.processes()) == ["ls-worker-1"]

        def kill_and_start() -> None:
            other.process.kill()
            other.process.wait()
            nodes.start(1)

        assert answers(first, then=kill_and_start) == of_one_rank, nodes.logs()
        wait_until(lambda: all(first.metrics()[name] == 0 for name in KV_USED))


@pytest.mark.long  # four workers; test/router/kv/test_cached_blocks.py and --dp without groups have the parts of it
def test_two_engines_of_two_groups_give_the_text_of_one_rank_although_a_router_dies(
    model_dir: str, of_one_rank: list[list[int]], tmp_path: Path
) -> None:
    with running_server(tmp_path / "log", *FLAGS, "--model_dir", model_dir, *GROUPS, "--dp", "2") as server:
        assert answers(server) == of_one_rank
        router = server.processes()["ls-router-1"][0]

        assert answers(server, then=router.kill) == of_one_rank

        wait_until(lambda: "engine 1 is back" in server.log)
        assert server.stop() == 0


def test_every_group_has_the_pinned_prefixes_also_after_a_rank_died(model_dir: str, tmp_path: Path) -> None:
    text = " ".join(f"w{5 + i % 50}" for i in range(70))
    (tmp_path / "prompts.json").write_text(json.dumps({"support": text}))
    word_tokenizer().save(str(tmp_path / "tokenizer.json"))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(Path(model_dir) / name)
    prompts = ("--pinned_prefixes", str(tmp_path / "prompts.json"))
    request = {"task_id": "support", "max_tokens": 1}
    with running_server(tmp_path / "log", *FLAGS, "--model_dir", str(tmp_path), *GROUPS, *prompts) as server:
        length = len(server.post("/tokenize", {"prompt": text})[1]["tokens"])
        wait_until(lambda: server.metrics()["kv_pinned_tokens"] == 2 * length)

        replies = [server.post(COMPLETE, request | {"prompt": [60 + i] * 3})[1] for i in range(4)]
        kill_worker(server, "ls-worker-1")
        wait_until(restarted(server, 1))
        wait_until(lambda: server.metrics()["kv_pinned_tokens"] == 2 * length)
        replies += [server.post(COMPLETE, request | {"prompt": [60 + i] * 3})[1] for i in range(4)]

    assert all(reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= length for reply in replies)


def test_a_stopped_server_finishes_the_requests_of_all_groups(
    two_groups: ServerProcess, of_one_rank: list[list[int]]
) -> None:
    codes: list[int] = []

    last = answers(two_groups, then=lambda: codes.append(two_groups.stop()))

    assert codes == [0]
    assert last == of_one_rank


@pytest.mark.long
def test_groups_with_stages_give_the_text_of_one_rank_although_a_stage_dies(
    model_dir: str, of_one_rank: list[list[int]], tmp_path: Path
) -> None:
    with running_server(tmp_path / "log", *FLAGS, "--model_dir", model_dir, *GROUPS, "--pp", "2") as server:
        assert answers(server) == of_one_rank
        assert [Clients(server).answer(request) for request in bodies()[:4]] == of_one_rank[:4]  # one group has nothing

        assert answers_although_killed(server, "ls-worker-3") == of_one_rank

        wait_until(restarted(server, 1))
        assert server.stop() == 0


@pytest.mark.long
def test_groups_of_two_ranks_give_the_text_of_one_rank(tmp_path: Path) -> None:
    tiny = build(CASES["glm4_moe"])  # 12 experts: four ranks divide them
    (tmp_path / "config.json").write_text(json.dumps(tiny.config_json))
    save_file(tiny.tensors, tmp_path / "model.safetensors")
    flags = (*FLAGS, "--model_dir", str(tmp_path))
    with running_server(tmp_path / "one", *flags) as server:
        alone = answers(server)
    with running_server(tmp_path / "four", *flags, "--tp", "4", "--ep", "4", "--attention_dp", "2") as server:
        together = answers(server)
        although_killed = answers_although_killed(server, "ls-worker-3")

    assert together == alone
    assert although_killed == alone
