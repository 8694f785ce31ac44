"""Pipeline stages through the server give the same text as one rank, also when a stage dies, and work at once."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmark.make_adapters import target_sizes
from lightserve.offline.llm import LLM
from test.api.server import ServerProcess, running_server
from test.api.test_restart import answers, clients_of, kill_worker, restarted, sixteen
from test.lora_files import write_adapter
from test.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.tp]

ADAPTERS = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
FLAGS = ("--device", "cpu", "--max_total_token_num", "4096")
Interval = tuple[float, float]


@pytest.fixture(scope="module")
def adapters(spoilt_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, sizes = tmp_path_factory.mktemp("adapters"), target_sizes(spoilt_model)
    for number in range(ADAPTERS):
        write_adapter(folder / f"a{number}", sizes, seed=number, strength=8.0)
    return folder


@pytest.fixture(scope="module")
def two_stages(spoilt_model: str, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("pp")
    folders = ("--profile_dir", str(folder / "profiles"), "--lora_dir", str(adapters))
    flags = (*FLAGS, "--model_dir", spoilt_model, "--pp", "2", *folders, "--max_loras", "2")
    with running_server(folder / "log", *flags) as server:
        yield server


def answers_although_killed(server: ServerProcess, worker: str) -> list[Any]:
    with clients_of(server) as clients:
        responses = clients.ask(sixteen())
        wait_until(lambda: clients.events > 100)
        kill_worker(server, worker)
        return [response.result() for response in responses]


def test_two_stages_give_the_text_of_one_rank(two_stages: ServerProcess, of_one_rank: list[Any]) -> None:
    assert answers(two_stages) == of_one_rank
    assert "2 ranks" in two_stages.log


@pytest.mark.parametrize(
    ("worker", "times"), [("ls-worker", 1), pytest.param("ls-worker-1", 2, marks=pytest.mark.long)]
)
def test_a_stage_that_dies_is_replaced_with_the_others_and_no_text_changes(
    two_stages: ServerProcess, of_one_rank: list[Any], worker: str, times: int
) -> None:
    assert answers_although_killed(two_stages, worker) == of_one_rank

    wait_until(restarted(two_stages, times))
    two_stages.wait_for_log(f"model worker {times - 1} died (signal 9); restarting the workers")
    wait_until(lambda: two_stages.metrics()["kv_used_tokens"] == 0)


def test_adapters_give_the_text_of_one_rank_in_two_stages_although_one_is_killed(
    two_stages: ServerProcess, spoilt_model: str, adapters: Path
) -> None:
    """There is room for two of them at a time."""
    names = [f"a{number}" for number in range(ADAPTERS)]
    llm = LLM(spoilt_model, device="cpu", max_loras=1, max_total_token_num=512)
    options: dict[str, Any] = {"temperature": 0.3, "seed": 3, "ignore_eos": True}
    expected = [
        llm.generate([PROMPT], lora=str(adapters / name), max_new_tokens=40, **options)[0].text for name in names
    ]
    assert len(set(expected)) == ADAPTERS
    bodies = [{"model": name, "prompt": PROMPT, "max_tokens": 40, **options} for name in names]
    restarts = two_stages.log.count("restarting the workers")

    with ThreadPoolExecutor(ADAPTERS) as threads:
        found = [threads.submit(two_stages.post, "/v1/completions", body) for body in bodies * 2]
        wait_until(lambda: two_stages.metrics()["generation_tokens_total"] > 0)
        kill_worker(two_stages, "ls-worker-1")
        texts = [response.result()[1]["choices"][0]["text"] for response in found]

    assert texts == expected * 2
    wait_until(lambda: two_stages.log.count("restarting the workers") == restarts + 1)


def test_a_profile_shows_both_stages_at_work_at_once(two_stages: ServerProcess) -> None:
    two_stages.post("/start_profile", {"max_seconds": 60})
    with clients_of(two_stages) as clients:
        _ = [response.result() for response in clients.ask(sixteen()[:4])]
    _, profile = two_stages.post("/stop_profile", {})
    events = json.loads(gzip.decompress(Path(profile["path"]).read_bytes()))["traceEvents"]

    first, last = (launches(events, f"model worker {rank}") for rank in range(2))

    assert len(first) == len(last) > 50
    ahead = [begin < end for (begin, _), (_, end) in zip(first[1:], last[:-1], strict=True)]
    assert sum(ahead) > len(ahead) / 4  # none if a step waited for the whole step before it, on however busy a machine


def launches(events: list[dict[str, Any]], process: str) -> list[Interval]:
    """When a worker computed each step, in their order."""
    (pid,) = {one["pid"] for one in events if one["name"] == "process_name" and one["args"]["name"] == process}
    spans = [one for one in events if one["pid"] == pid and one["name"] == "launch" and one.get("ph") == "X"]
    return sorted((one["ts"], one["ts"] + one["dur"]) for one in spans)


@pytest.mark.long
def test_stages_of_two_ranks_give_the_text_of_one_rank(
    spoilt_model: str, of_one_rank: list[Any], tmp_path: Path
) -> None:
    with running_server(tmp_path / "log", *FLAGS, "--model_dir", spoilt_model, "--tp", "2", "--pp", "2") as server:
        assert answers(server) == of_one_rank
        for worker in ("ls-worker-1", "ls-worker-2"):  # of each stage
            assert answers_although_killed(server, worker) == of_one_rank
        assert server.stop() == 0
