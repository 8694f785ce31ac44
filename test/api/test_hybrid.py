"""A model with recurrent layers over HTTP: the text of transformers, from cached prefixes too, whatever happens."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from lightserve.text.beam_search import BeamParams
from test.api.server import ServerProcess, running_server
from test.api.test_prefix_cache import CHAT, COMPLETE, ask, at_once, cached
from test.api.test_restart import clients_of, kill_worker
from test.hybrid_model import greedy, prompt, save_hybrid_model, text_of
from test.text.test_beam_search import transformers_beams
from test.waiting import wait_until

pytestmark = pytest.mark.slow

FLAGS = ("--device", "cpu", "--dtype", "float32", "--batch_max_tokens", "64")


class Hybrid:
    def __init__(self, server: ServerProcess, folder: str, model: Any) -> None:
        self.server = server
        self.folder = folder
        self._model = model

    def text(self, ids: list[int], count: int) -> str:
        """What transformers generates."""
        return text_of(greedy(self._model, ids, count))

    def beams(self, ids: list[int], params: BeamParams) -> list[str]:
        return [text_of(beam.token_ids) for beam in transformers_beams(self._model, ids, params, [])]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hybrid]:
    folder, model = save_hybrid_model(tmp_path_factory.mktemp("hybrid"))
    rows = ("--max_total_token_num", "800", "--max_state_rows", "12", "--running_max_req_size", "8")
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(log, "--model_dir", folder, *FLAGS, *rows, "--router_token_ratio", "1") as server:
        yield Hybrid(server, folder, model)
        assert server.stop() == 0


def body(ids: list[int], count: int = 10, **options: Any) -> dict[str, Any]:
    return {"prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True} | options


def test_the_second_request_with_a_prompt_computes_its_last_token_only(hybrid: Hybrid) -> None:
    ids = prompt(100, seed=1)

    responses = [ask(hybrid.server, COMPLETE, **body(ids)) for _ in range(2)]

    assert [cached(response["usage"]) for response in responses] == [0, 99]
    assert [response["choices"][0]["text"] for response in responses] == [hybrid.text(ids, 10)] * 2
    assert "states of 12 requests and prefixes" in hybrid.server.log


def test_each_turn_of_a_chat_continues_the_state_of_the_last_answer(hybrid: Hybrid) -> None:
    messages: list[dict[str, str]] = []
    known = 0  # tokens of the turn before, its answer included
    for turn in range(3):
        messages.append({"role": "user", "content": text_of(prompt(40, seed=turn))})

        response = ask(hybrid.server, CHAT, messages=messages, max_tokens=8, ignore_eos=True)

        ids = [token for message in messages for token in (1, *ids_of(message["content"]))] + [2]
        answer = response["choices"][0]["message"]
        assert answer["content"] == hybrid.text(ids, 8)
        # the template writes w2 before an answer, and w1 before an old one: so the prefix ends there
        assert cached(response["usage"]) == (known and known - 9), turn
        known = response["usage"]["total_tokens"]
        messages.append(answer)


def ids_of(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def test_requests_at_once_share_what_they_have_in_common(hybrid: Hybrid) -> None:
    """The first may be past it when the second comes, which then keeps the state for the others."""
    prompts = [prompt(120, seed=3) + prompt(10, seed=100 + n) for n in range(6)]

    responses = asyncio.run(at_once(hybrid.server, COMPLETE, [body(ids) for ids in prompts]))

    assert [one["choices"][0]["text"] for one in responses] == [hybrid.text(ids, 10) for ids in prompts]
    assert sum(cached(one["usage"]) >= 120 for one in responses) >= 4


def test_choices_begin_with_one_state(hybrid: Hybrid) -> None:
    ids = prompt(90, seed=4)

    with hybrid.server.computing() as computed:
        response = ask(hybrid.server, COMPLETE, **body(ids, n=3))

    assert [choice["text"] for choice in response["choices"]] == [hybrid.text(ids, 10)] * 3
    assert computed.tokens == 90 + 2 * 1 + 3 * 9  # the others compute the last token of the prompt only


def test_beams_are_those_of_transformers(hybrid: Hybrid) -> None:
    ids, params = prompt(70, seed=5), BeamParams(num_beams=3, n=3, max_new_tokens=6)

    response = ask(hybrid.server, COMPLETE, **body(ids, 6, use_beam_search=True, best_of=3, n=3))

    assert [choice["text"] for choice in response["choices"]] == hybrid.beams(ids, params)


def test_more_streams_than_memory_holds_give_the_text_of_transformers(hybrid: Hybrid) -> None:
    """Outputs are longer than those before, so requests are preempted."""
    ask(hybrid.server, COMPLETE, **body([], 2) | {"prompt": [prompt(5, seed=n) for n in range(60)]})
    prompts = [prompt(100, seed=200 + n) for n in range(6)]
    before = hybrid.server.settled_metrics()

    responses = asyncio.run(at_once(hybrid.server, COMPLETE, [body(ids, 80) for ids in prompts]))

    after = hybrid.server.settled_metrics()
    assert [one["choices"][0]["text"] for one in responses] == [hybrid.text(ids, 80) for ids in prompts]
    assert after["num_preemptions_total"] > before["num_preemptions_total"]
    assert after["kv_group_evicted_slots_total/state"] > before["kv_group_evicted_slots_total/state"]
    assert_idle(hybrid.server)


def assert_idle(server: ServerProcess) -> None:
    wait_until(lambda: server.metrics()["num_requests_running"] == 0)
    wait_until(lambda: server.metrics()["kv_used_tokens"] == 0)
    wait_until(lambda: server.metrics()["kv_group_used_slots/state"] == 0)
    assert server.metrics()["kv_group_slots/state"] == 12
    assert 0 < server.metrics()["kv_group_kept_slots/state"] <= 12


def test_a_client_that_leaves_frees_its_row(hybrid: Hybrid) -> None:
    ids = prompt(60, seed=6)
    place = urlsplit(hybrid.server.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    stream = json.dumps(body(ids, 700, stream=True))
    connection.request("POST", COMPLETE, stream, {"Content-Type": "application/json"})
    connection.getresponse().readline()
    connection.close()

    assert_idle(hybrid.server)
    response = ask(hybrid.server, COMPLETE, **body(ids))
    assert response["choices"][0]["text"] == hybrid.text(ids, 10)


def test_streams_continue_with_the_same_text_after_the_worker_dies(hybrid: Hybrid) -> None:
    prompts = [prompt(80, seed=7 + n % 2) + prompt(10, seed=300 + n) for n in range(4)]
    with clients_of(hybrid.server) as clients:
        responses = clients.ask([body(ids, 60, stream=True) for ids in prompts])
        wait_until(lambda: clients.events > 40)
        kill_worker(hybrid.server)
        texts = [response.result()[0]["text"] for response in responses]

    assert texts == [hybrid.text(ids, 60) for ids in prompts]
    assert_idle(hybrid.server)
    assert hybrid.server.metrics()["worker_restarts_total"] == 1


@pytest.mark.tp
@pytest.mark.parametrize(
    "ranks",
    [("--tp", "2"), ("--pp", "2"), ("--tp", "2", "--ep", "2", "--enable_dp_attention")],
    ids=["tp", "pp", "groups"],
)
def test_two_ranks_give_the_same_text_although_one_is_killed(
    hybrid: Hybrid, tmp_path: Path, ranks: tuple[str, ...]
) -> None:
    """The first of two stages has recurrent layers only."""
    ids = prompt(100, seed=8)
    prompts = [prompt(80, seed=7 + n % 2) + prompt(10, seed=400 + n) for n in range(4)]

    with running_server(tmp_path / "log", "--model_dir", hybrid.folder, *FLAGS, *ranks) as server:
        responses = [ask(server, COMPLETE, **body(ids)) for _ in range(2)]
        with clients_of(server) as clients:
            streams = clients.ask([body(ids, 40, stream=True) for ids in prompts])
            wait_until(lambda: clients.events > 20)
            kill_worker(server, "ls-worker-1")
            texts = [stream.result()[0]["text"] for stream in streams]

    assert texts == [hybrid.text(ids, 40) for ids in prompts]
    assert [cached(response["usage"]) for response in responses] == [0, 99]
    assert [response["choices"][0]["text"] for response in responses] == [hybrid.text(ids, 10)] * 2
