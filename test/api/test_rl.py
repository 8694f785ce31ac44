"""The endpoints of --enable_rl over a real server with a tiny model: what a trainer asks, and what requests see."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from benchmark.models import TINY, save_model
from test.api.server import ServerProcess, running_server
from test.waiting import wait_until

pytestmark = pytest.mark.slow

KEY = "for-trainers"
NONE_WAITS = {"num_waiting_reqs": 0}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LONG = 1500  # tokens: a second or two
FLAGS = ("--load_format", "dummy", "--max_total_token_num", "4096", "--max_req_total_len", "2048", "--enable_rl")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("rl")
    model = root / "model"
    model.mkdir()
    save_model(model, None, TINY)
    with running_server(root / "log", "--model_dir", str(model), *FLAGS, "--admin_key", KEY) as server:
        yield server


def get(server: ServerProcess, path: str) -> Any:
    request = urllib.request.Request(server.url + path, headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def post(server: ServerProcess, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    return server.post(path, body or {}, Authorization=f"Bearer {KEY}")


def test_a_trainer_reads_the_world_size_and_the_configuration(server: ServerProcess) -> None:
    info = get(server, "/server_info")

    assert get(server, "/get_world_size?include_dp=true") == {"world_size": 1}
    assert info["vllm_config"]["parallel_config"]["data_parallel_size"] == 1
    assert info["vllm_config"]["model_config"]["dtype"] == f"torch.{info['dtype']}"
    assert info["vllm_config"]["weight_transfer_config"] == {"backend": "nccl"}


def test_a_trainer_waits_until_nothing_runs(server: ServerProcess, clients: ThreadPoolExecutor) -> None:
    running = start(server, clients)
    assert get(server, "/v1/loads?include=core")["loads"][0]["num_running_reqs"] == 1

    post(server, "/abort_requests")

    running.result()
    wait_until(lambda: get(server, "/v1/loads")["loads"][0] == {"dp_rank": 0, "num_running_reqs": 0} | NONE_WAITS)
    assert get(server, "/health_generate") == {"status": "ok"}


def test_the_endpoints_of_trainers_need_the_admin_key(server: ServerProcess) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{server.url}/get_world_size")

    assert refused.value.code == 401


class Completion(NamedTuple):
    status: int
    choices: list[Any]
    cached_tokens: int = 0

    @property
    def ids(self) -> list[int]:
        found: list[int] = self.choices[0]["token_ids"]
        return found


def complete(server: ServerProcess, tokens: int, **fields: Any) -> Completion:
    asked = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    status, response = server.post("/v1/completions", asked | fields)
    if status != 200:
        return Completion(status, [])
    return Completion(status, response["choices"], response["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def start(server: ServerProcess, clients: ThreadPoolExecutor, **fields: Any) -> Future[Completion]:
    """A long request that runs when this returns."""
    before = server.metrics()["generation_tokens_total"]
    running = clients.submit(complete, server, LONG, **fields)
    wait_until(lambda: server.metrics()["generation_tokens_total"] > before or running.done())
    return running


def open_requests(server: ServerProcess) -> float:
    metrics = server.metrics()
    return metrics["num_requests_waiting"] + metrics["num_requests_running"]


def is_paused(server: ServerProcess) -> bool:
    return bool(get(server, "/is_paused")["is_paused"])


def test_abort_returns_the_tokens_and_logprobs_so_far(server: ServerProcess, clients: ThreadPoolExecutor) -> None:
    whole = complete(server, LONG)
    running = start(server, clients, logprobs=0)

    assert post(server, "/abort_requests") == (200, {"status": "aborted", "aborted": 1})

    aborted = running.result()
    assert aborted.status == 200
    assert aborted.choices[0]["finish_reason"] == "abort"
    assert 0 < len(aborted.ids) < LONG
    assert aborted.ids == whole.ids[: len(aborted.ids)]
    assert len(aborted.choices[0]["logprobs"]["token_logprobs"]) == len(aborted.ids)


def test_abort_by_id_ends_one_request_only(server: ServerProcess, clients: ThreadPoolExecutor) -> None:
    others = [start(server, clients, request_id=name) for name in ("one", "two")]

    assert post(server, "/abort_requests", {"request_ids": ["one"]})[1]["aborted"] == 1

    assert others[0].result().choices[0]["finish_reason"] == "abort"
    assert not others[1].done() or others[1].result().choices[0]["finish_reason"] == "length"
    assert others[1].result().choices[0]["finish_reason"] == "length"


def test_an_aborted_stream_ends_with_its_tokens(server: ServerProcess, clients: ThreadPoolExecutor) -> None:
    body = {"prompt": PROMPT, "max_tokens": LONG, "stream": True, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as stream:
        events = [stream.readline() for _ in range(8)]  # four chunks, each followed by an empty line

        post(server, "/abort_request", {"abort_all": True})

        events += stream.readlines()
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events if event.startswith(b"data: {")]
    assert events[-2] == b"data: [DONE]\n"
    assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
    assert 0 < sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) < LONG


@pytest.mark.parametrize("clears", ["true", "false"])
def test_requests_that_a_pause_keeps_have_the_text_of_an_undisturbed_run(
    server: ServerProcess, clients: ThreadPoolExecutor, clears: str
) -> None:
    whole = complete(server, LONG)
    running = start(server, clients)

    assert post(server, f"/pause?mode=keep&clear_cache={clears}") == (200, {"status": "paused"})
    assert is_paused(server)
    waiting = clients.submit(complete, server, 3)
    wait_until(lambda: open_requests(server) == 2)

    assert not running.done()
    assert not waiting.done()
    assert post(server, "/resume") == (200, {"status": "resumed"})
    assert running.result().ids == whole.ids
    assert waiting.result().ids == whole.ids[:3]


def test_a_pause_that_waits_lets_requests_finish_and_refuses_new_ones(
    server: ServerProcess, clients: ThreadPoolExecutor
) -> None:
    running = start(server, clients)
    pausing = clients.submit(post, server, "/pause?mode=wait")
    wait_until(lambda: is_paused(server) or running.done())

    refused = complete(server, 3)

    assert pausing.result() == (200, {"status": "paused"})
    assert running.result().choices[0]["finish_reason"] == "length"
    assert refused.status == 503
    assert post(server, "/resume")[0] == 200
    assert complete(server, 3).status == 200


def test_a_resume_ends_a_pause_that_still_waits(server: ServerProcess, clients: ThreadPoolExecutor) -> None:
    running = start(server, clients)
    pausing = clients.submit(post, server, "/pause?mode=wait")
    wait_until(lambda: is_paused(server))
    assert not running.done()

    post(server, "/resume")

    assert pausing.result()[0] == 409
    assert complete(server, 3).status == 200
    post(server, "/abort_requests")
    running.result()


def test_slimes_order_pause_flush_continue(server: ServerProcess, clients: ThreadPoolExecutor) -> None:
    running = start(server, clients)

    assert post(server, "/pause_generation")[1]["status"] == "ok"
    assert running.result().choices[0]["finish_reason"] == "abort"
    waiting = clients.submit(complete, server, 3)
    assert text_of(server, "/flush_cache") == (200, "Cache flushed.\n")
    assert not waiting.done()
    assert post(server, "/continue_generation")[1]["status"] == "ok"
    assert waiting.result().status == 200


def test_a_flush_is_refused_while_requests_run_and_drops_what_is_cached(
    server: ServerProcess, clients: ThreadPoolExecutor
) -> None:
    running = start(server, clients)
    refused = text_of(server, "/flush_cache")
    assert refused[0] == 400
    assert "1 requests are open" in refused[1]
    assert post(server, "/reset_prefix_cache")[1]["success"] is False
    assert post(server, "/reset_prefix_cache?reset_running_requests=true") == (200, {"success": True})
    running.result()

    complete(server, 3)
    assert complete(server, 3).cached_tokens == len(PROMPT) - 1
    assert post(server, "/reset_prefix_cache") == (200, {"success": True})
    assert complete(server, 3).cached_tokens == 0


def text_of(server: ServerProcess, path: str) -> tuple[int, str]:
    request = urllib.request.Request(server.url + path, headers={"Authorization": f"Bearer {KEY}"})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--null_worker", "--enable_rl", "--admin_key", KEY)
    with running_server(tmp_path_factory.mktemp("chat") / "log", *flags) as server:
        yield server


def chat(server: ServerProcess, template: Any, key: str = KEY) -> tuple[int, Any]:
    body = {"messages": [{"role": "user", "content": "Hello"}], "chat_template": template, "max_tokens": 1}
    return server.post("/v1/chat/completions", body | {"return_token_ids": True}, Authorization=f"Bearer {key}")


def test_a_trainer_brings_its_chat_template(chat_server: ServerProcess) -> None:
    status, response = chat(chat_server, TEMPLATE)

    _, expected = chat_server.post("/tokenize", {"prompt": "<user>Hello", "add_special_tokens": False})
    assert status == 200
    assert response["prompt_token_ids"] == expected["tokens"]


@pytest.mark.parametrize(
    ("template", "key", "refusal"),
    [
        (TEMPLATE, "another", (403, "admin key")),
        ("{% for", KEY, (400, "not valid Jinja")),
        ("{% for a in range(10**9) %}x{% endfor %}", KEY, (400, "chat template")),
        (3, KEY, (400, "must be a text")),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_refused(
    chat_server: ServerProcess, template: Any, key: str, refusal: tuple[int, str]
) -> None:
    status, response = chat(chat_server, template, key)

    assert (status, refusal[1] in response["error"]["message"]) == (refusal[0], True), response
