"""--pinned_prefixes: a request names a prompt that stays in the prefix cache, whatever happens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightserve.messages.int_arrays import int32s
from lightserve.router.kv.radix_cache import common_len
from test.api.server import RESPONSE_S, ServerProcess, running_server
from test.waiting import wait_until

pytestmark = pytest.mark.slow

COMPLETE, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
STATIC = {"support": "the quick brown fox jumps over the lazy dog " * 6, "7": "one two three four five six " * 4}
OWN = [3, 1, 4, 1, 5]
KV_TOKENS = "4096"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from test.small_text import save_small_model  # here, because it imports transformers

    folder = tmp_path_factory.mktemp("model")
    save_small_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    (folder / "prompts.json").write_text(json.dumps(STATIC))
    return folder


def flags(model: Path, *more: str) -> list[str]:
    prompts = ["--pinned_prefixes", str(model / "prompts.json")]
    return ["--model_dir", str(model), "--deterministic", "--max_total_token_num", KV_TOKENS, *prompts, *more]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    log = tmp_path_factory.mktemp("static") / "log"
    with running_server(log, *flags(model, "--chat_template", template)) as server:
        yield server


def ids_of(server: ServerProcess, name: str) -> list[int]:
    status, reply = server.post("/tokenize", {"prompt": STATIC[name]})
    assert status == 200, reply
    ids: list[int] = reply["tokens"]
    return ids


def ask(server: ServerProcess, path: str, **body: Any) -> Any:
    status, response = server.post(path, body)
    assert status == 200, response
    return response


def wait_until_pinned(server: ServerProcess, engines: int = 1) -> int:
    first, second = (ids_of(server, name) for name in STATIC)
    tokens = engines * (len(first) + len(second) - common_len(int32s(first), int32s(second)))
    wait_until(lambda: server.metrics()["kv_pinned_tokens"] == tokens)
    return tokens


@pytest.mark.parametrize("name", ["support", "7", 7])
def test_the_pinned_prefix_comes_before_the_own_one_and_is_cached(server: ServerProcess, name: str | int) -> None:
    wait_until_pinned(server)
    static = ids_of(server, str(name))
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0}

    whole = ask(server, COMPLETE, prompt=static + OWN, disable_prompt_cache=True, **options)
    named = ask(server, COMPLETE, prompt=OWN, task_id=name, **options)

    assert named["choices"][0]["text"] == whole["choices"][0]["text"]
    assert named["usage"]["prompt_tokens"] == len(static) + len(OWN)
    assert named["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(static)


def test_other_apis_have_the_field(server: ServerProcess) -> None:
    wait_until_pinned(server)
    static = ids_of(server, "support")

    chat = ask(server, CHAT, messages=[{"role": "user", "content": "hello"}], max_tokens=2, task_id="support")
    ask(server, GENERATE, inputs="hello", parameters={"max_new_tokens": 2, "task_id": "support"})

    assert chat["usage"]["prompt_tokens"] > len(static)
    assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(static)


@pytest.mark.parametrize("name", ["nobody", 8, "", [], {}])
@pytest.mark.parametrize("path", [COMPLETE, CHAT, GENERATE])
def test_an_unknown_name_is_refused(server: ServerProcess, path: str, name: Any) -> None:
    bodies: dict[str, dict[str, Any]] = {
        COMPLETE: {"prompt": "a", "task_id": name},
        CHAT: {"messages": [{"role": "user", "content": "a"}], "task_id": name},
        GENERATE: {"inputs": "a", "parameters": {"task_id": name}},
    }

    status, reply = server.post(path, bodies[path])

    assert status in (400, 422), reply
    assert "task_id" in json.dumps(reply)
    if name == "nobody":
        assert "this server has 'support', '7'" in json.dumps(reply)


def test_pins_survive_a_full_pool_and_the_death_of_the_worker(model: Path, tmp_path: Path) -> None:
    with running_server(tmp_path / "log", *flags(model)) as server:
        tokens = wait_until_pinned(server)
        static = ids_of(server, "support")
        for number in range(40):  # 10,000 tokens in all
            ask(server, COMPLETE, prompt=[number + 2, *range(2, 130)] * 2, max_tokens=1)
        evicted = ask(server, COMPLETE, prompt=OWN, task_id="support", max_tokens=1)
        wait_until(lambda: server.metrics()["prefix_cache_evicted_tokens_total"] > 0)
        before = ask(server, COMPLETE, prompt=OWN, task_id="support", max_tokens=8, temperature=0)

        server.processes()["ls-worker"][0].kill()
        wait_until(lambda: server.metrics()["worker_restarts_total"] == 1)
        wait_until_pinned(server)
        after = ask(server, COMPLETE, prompt=OWN, task_id="support", max_tokens=8, temperature=0)

        assert evicted["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(static)
        assert after["choices"] == before["choices"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(static)
        wait_until(lambda: server.metrics()["kv_used_tokens"] == tokens)  # nothing else is held


def test_every_engine_pins_them(model: Path, tmp_path: Path) -> None:
    with running_server(tmp_path / "log", *flags(model, "--dp", "2")) as server:
        wait_until_pinned(server, engines=2)

        replies = [ask(server, COMPLETE, prompt=[*OWN, at], task_id="support", max_tokens=1) for at in range(8)]

        static = len(ids_of(server, "support"))
        assert all(reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= static for reply in replies)


@pytest.mark.parametrize(
    ("more", "text", "reason"),
    [
        ((), "{", "is neither JSON"),
        (("--disable_dynamic_prompt_cache",), '{"a": "b"}', "cannot be used with --disable_dynamic_prompt_cache"),
        (("--max_total_token_num", "300"), json.dumps({"a": "fox " * 100}), "would be pinned; the limit is 50%"),
        (("--max_req_total_len", "64"), json.dumps({"a": "fox " * 100}), "and a request may have 64"),
    ],
)
def test_a_start_that_cannot_work_says_why(
    model: Path, tmp_path: Path, more: tuple[str, ...], text: str, reason: str
) -> None:
    (tmp_path / "prompts.json").write_text(text)
    command = [sys.executable, "-m", "lightserve.server.api_server", "--port", "0", "--model_dir", str(model)]

    done = subprocess.run(
        [*command, "--pinned_prefixes", str(tmp_path / "prompts.json"), *more],
        capture_output=True,
        text=True,
        timeout=RESPONSE_S,
        check=False,
    )

    assert done.returncode != 0
    assert reason in done.stderr.strip().splitlines()[-1]
