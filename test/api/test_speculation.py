"""Speculation through the server: the same texts as without it, what usage and /metrics say, and a worker that dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightserve.offline.llm import LLM
from test.api.server import ServerProcess, running_server
from test.api.test_ep import FLAGS, GROUPS, bodies, save_expert_model
from test.api.test_restart import clients_of, kill_worker, restarted
from test.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.tp]

CONFIG = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
UNMERGED = [2, 3, 4, 7, 13, 14, 15, 16]  # single characters: a text of them has these tokens again
PROMPTS = [[5, 9, 7, 5, 9, 7, 5], [3, 4] * 6, [11, 12, 13], [8] * 9]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.5, "seed": 3, "n": 2},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "stop": ["ab"], "frequency_penalty": 0.3},
    {"temperature": 0.4, "seed": 5, "logprobs": 2, "repetition_penalty": 1.2},
    {"temperature": 0, "no_repeat_ngram_size": 4},
    {"temperature": 0.4, "seed": 6, "ignore_eos": False, "min_tokens": 9},
    {"temperature": 0, "watermark": True, "bad_words": ["ab1"]},
    {"temperature": 0, "guided_regex": "(ab|[0-9]){2,30}"},
    {"temperature": 0.7, "seed": 7, "guided_json": {"type": "array", "items": {"enum": ["ab", "a1"]}, "maxItems": 9}},
    {"temperature": 0, "logprobs": 2, "guided_choice": ["a dead extra text", "beta"]},
    {"temperature": 0, "num_beams": 3, "max_tokens": 10},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from test.small_text import save_small_model  # here, because it imports transformers

    folder = tmp_path_factory.mktemp("small")
    save_small_model(folder, context_len=1024)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


@pytest.fixture(scope="module", params=["--tp", "--pp"])
def server(
    folder: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(log, *flags_of(folder), request.param, "2") as server:
        yield server


@pytest.fixture(scope="module")
def plain(folder: str) -> LLM:
    return LLM(folder, device="cpu", data_type="float32", max_total_token_num=4096)


def flags_of(folder: str) -> tuple[str, ...]:
    common = ("--model_dir", folder, "--device", "cpu", "--dtype", "float32", "--max_total_token_num", "4096")
    return (*common, "--speculative-config", CONFIG)


def ask(server: ServerProcess, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    status, response = server.post(path, {"max_tokens": 40, "ignore_eos": True, **body})
    assert status == 200, response
    answer: dict[str, Any] = response
    return answer


def drafts_of(response: dict[str, Any]) -> tuple[int, int]:
    """Accepted and rejected."""
    details = response["usage"].get("completion_tokens_details", {})
    return details.get("accepted_prediction_tokens", 0), details.get("rejected_prediction_tokens", 0)


def test_the_banner_names_the_drafts(server: ServerProcess) -> None:
    assert "ngram of 1 to 3 tokens, up to 3 drafts a step" in server.log


@pytest.mark.parametrize("prompt", range(len(PROMPTS)))
def test_two_ranks_give_the_text_of_one_without_drafts(server: ServerProcess, plain: LLM, prompt: int) -> None:
    (expected,) = plain.generate([PROMPTS[prompt]], max_new_tokens=40, temperature=0, ignore_eos=True)

    assert ask(server, {"prompt": PROMPTS[prompt], "temperature": 0})["choices"][0]["text"] == expected.text


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(reversed(options)))
def test_a_request_may_switch_drafts_off_and_gets_the_same(server: ServerProcess, options: dict[str, Any]) -> None:
    for prompt in PROMPTS:
        drafted = ask(server, {"prompt": prompt, **options})
        without = ask(server, {"prompt": prompt, "speculative": False, **options})

        assert drafted["choices"] == without["choices"]
        assert drafts_of(without) == (0, 0)
        assert drafted["usage"]["completion_tokens"] == without["usage"]["completion_tokens"]


def test_a_prediction_is_accepted_and_counted(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "ab 12 ab"}], "seed": 5, "allowed_token_ids": UNMERGED}
    before = server.settled_metrics()

    plain = ask(server, body, "/v1/chat/completions")
    text = plain["choices"][0]["message"]["content"]
    predicted = ask(server, body | {"prediction": {"type": "content", "content": text}}, "/v1/chat/completions")

    after = server.settled_metrics()
    assert predicted["choices"] == plain["choices"]
    accepted, rejected = drafts_of(predicted)
    assert accepted > drafts_of(plain)[0]
    both = [drafts_of(plain)[i] + (accepted, rejected)[i] for i in range(2)]
    counted = {name: after[name] - before.get(name, 0) for name in after if name.startswith("spec_decode")}
    assert counted["spec_decode_num_accepted_tokens_total"] == both[0]
    assert counted["spec_decode_num_draft_tokens_total"] == sum(both)
    assert 0 < counted["spec_decode_num_drafts_total"] <= sum(both)


@pytest.mark.parametrize(
    ("prediction", "problem"),
    [
        ("text", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "tokens", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "image_url"),
    ],
)
def test_a_malformed_prediction_is_refused(server: ServerProcess, prediction: Any, problem: str) -> None:
    body = {"messages": [{"role": "user", "content": "ab"}], "prediction": prediction}

    status, response = server.post("/v1/chat/completions", body)

    assert status == 400
    assert problem in str(response)


def assert_that_a_death_changes_no_text(server: ServerProcess, **fields: Any) -> None:
    """A worker dies in the middle of eight streams with these fields."""
    bodies = [
        {"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": temperature, "seed": 1}
        | fields
        for prompt in PROMPTS
        for temperature in (0, 0.5)
    ]
    num_restarts = server.log.count("a new model worker is ready")
    with clients_of(server) as clients:
        expected = [response.result()[0]["text"] for response in clients.ask(bodies)]
        events = clients.events
        responses = clients.ask(bodies)
        wait_until(lambda: clients.events > events + 100)
        kill_worker(server, "ls-worker-1")
        texts = [response.result()[0]["text"] for response in responses]

    assert texts == expected
    wait_until(restarted(server, num_restarts + 1))
    wait_until(lambda: server.metrics()["kv_used_tokens"] == server.metrics()["kv_pinned_tokens"])


@pytest.mark.parametrize("fields", [{}, {"guided_regex": "(ab|[0-9]){2,300}"}], ids=["text", "grammar"])
def test_a_worker_that_dies_in_the_middle_changes_no_text(server: ServerProcess, fields: dict[str, Any]) -> None:
    assert_that_a_death_changes_no_text(server, **fields)


def test_attention_groups_draft_each_for_themselves(tmp_path: Path) -> None:
    flags = ("--model_dir", save_expert_model(tmp_path), *FLAGS, *GROUPS, "--speculative_config", CONFIG)
    with running_server(tmp_path / "log", *flags) as server, clients_of(server) as clients:
        asked = [body | {"stream": False} for body in bodies()]
        plain = [answer.result() for answer in clients.ask([body | {"speculative": False} for body in asked])]
        drafted = [answer.result() for answer in clients.ask(asked)]
        accepted = server.settled_metrics()["spec_decode_num_accepted_tokens_total"]

    assert drafted == plain
    assert accepted
