"""Draft heads through the server: two ranks give the text of one without drafts, also after a worker has died."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightserve.offline.llm import LLM
from test.api.server import ServerProcess, running_server
from test.api.test_speculation import (
    PROMPTS,
    TEMPLATE,
    UNMERGED,
    ask,
    assert_that_a_death_changes_no_text,
    drafts_of,
)
from test.worker.dflash import save_drafter
from test.worker.heads import save_head
from test.worker.test_draft_model import config_of as draft_model_config, save_draft_model
from test.worker.test_mtp import save_model as save_mtp_model
from test.worker.test_mtp_formats import Mtp

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.tp]

DRAFTED_IDS = [5, 9, 12]
LIKELY = {"allowed_token_ids": DRAFTED_IDS}
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, **LIKELY},
    {"temperature": 1.0, "seed": 3, "n": 2, **LIKELY},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "guided_regex": "(ab|[0-9]){2,30}"},
]

OPTIONS_OF_IDS: list[dict[str, Any]] = [
    {"temperature": 0, "frequency_penalty": 0.3, "logit_bias": {"5": 2}},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0, "no_repeat_ngram_size": 4},
]  # of models that need not have a tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from test.small_text import save_small_model  # here, because it imports transformers

    folder = tmp_path_factory.mktemp("small")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return save_small_model(folder, context_len=1024)


@pytest.fixture(scope="module", params=["eagle3", "dflash"])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["--tp", "--pp"])
def ranks(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def head(model: str, method: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """It names the model."""
    config = json.loads((Path(model) / "config.json").read_text())
    sizes = config["vocab_size"], config["hidden_size"], DRAFTED_IDS
    speculators = {
        "verifier": {"name_or_path": model},
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 2}],
        "default_proposal_method": "greedy",
    }
    folder = tmp_path_factory.mktemp("head")
    if method == "dflash":
        return save_drafter(folder, *sizes, speculators_config=speculators)
    return save_head(folder, *sizes, True, speculators_config=speculators)


@pytest.fixture(scope="module")
def server(head: str, ranks: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """``--model_dir`` is the head."""
    log = tmp_path_factory.mktemp("server") / "log"
    common = ("--device", "cpu", "--dtype", "float32", "--max_total_token_num", "4096", "--kv_ram_gb", "0.1")
    with running_server(log, "--model_dir", head, *common, ranks, "2") as server:
        yield server


@pytest.fixture(scope="module")
def plain(model: str) -> LLM:
    return LLM(model, device="cpu", data_type="float32", max_total_token_num=4096)


def test_a_head_as_model_dir_serves_its_model(server: ServerProcess, method: str, head: str, model: str) -> None:
    assert f"{method} by {head}, up to 2 drafts a step" in server.log
    assert ask(server, {"prompt": PROMPTS[0]})["model"] == Path(model).name


def mtp_behind_the_layers(folder: Path) -> tuple[str, str, str]:
    save_mtp_model(folder, "glm4_moe")
    return str(folder), "auto", "mtp, up to 3 drafts a step"


def mtp_of_recurrent_layers(folder: Path) -> tuple[str, str, str]:
    Mtp("qwen3_next", linear_num_key_heads=2, linear_num_value_heads=6).save(folder)
    return str(folder), "auto", "mtp, up to 3 drafts a step"


def draft_model(folder: Path) -> tuple[str, str, str]:
    from test.small_text import save_small_model

    save_small_model(folder / "model", context_len=1024)
    smaller = save_draft_model(folder / "draft", "gemma3_text", 140)
    return str(folder / "model"), draft_model_config(smaller), f"draft_model by {smaller}, up to 3 drafts a step"


@pytest.mark.parametrize("save", [mtp_behind_the_layers, mtp_of_recurrent_layers, draft_model])
def test_two_ranks_draft_the_same(tmp_path: Path, save: Callable[[Path], tuple[str, str, str]]) -> None:
    folder, speculation, summary = save(tmp_path / "model")
    flags = ("--device", "cpu", "--dtype", "float32", "--max_total_token_num", "2048")
    sampling: dict[str, Any] = {"temperature": 2.0, "seed": 5}
    expected = LLM(folder, device="cpu", data_type="float32", max_total_token_num=2048).generate(
        PROMPTS, max_new_tokens=40, ignore_eos=True, **sampling
    )

    accepted = 0
    config = ("--speculative_config", speculation)
    with running_server(tmp_path / "log", "--model_dir", folder, *flags, *config, "--tp", "2") as server:
        assert summary in server.log
        for prompt, generation in zip(PROMPTS, expected, strict=True):
            response = ask(server, {"prompt": prompt, "return_token_ids": True, **sampling})
            assert response["choices"][0]["token_ids"] == generation.token_ids
            accepted += drafts_of(response)[0]
            for options in OPTIONS_OF_IDS:
                body = {"prompt": prompt, "return_token_ids": True, **options}
                ids = [ask(server, body | {"speculative": speculative})["choices"] for speculative in (True, False)]
                assert ids[0][0]["token_ids"] == ids[1][0]["token_ids"], options
    assert accepted > 0


@pytest.mark.parametrize("prompt", range(len(PROMPTS)))
def test_two_ranks_give_the_text_of_one_without_drafts(server: ServerProcess, plain: LLM, prompt: int) -> None:
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "seed": 7}):
        fields: dict[str, Any] = {**sampling, **LIKELY}
        expected = plain.generate(
            [PROMPTS[prompt]], max_new_tokens=40, ignore_eos=True, **sampling, allowed_token_ids=tuple(DRAFTED_IDS)
        )

        response = ask(server, {"prompt": PROMPTS[prompt], **fields})

        assert response["choices"][0]["text"] == expected[0].text


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(reversed(options)))
def test_a_request_may_switch_drafts_off_and_gets_the_same(server: ServerProcess, options: dict[str, Any]) -> None:
    for prompt in PROMPTS:
        drafted = ask(server, {"prompt": prompt, **options})
        without = ask(server, {"prompt": prompt, "speculative": False, **options})

        assert drafted["choices"] == without["choices"]
        assert drafts_of(without) == (0, 0)


def test_a_prediction_is_drafted_from_beside_the_head(server: ServerProcess) -> None:
    chat = {"messages": [{"role": "user", "content": "ab 12 ab"}], "seed": 5, "allowed_token_ids": UNMERGED}

    plain = ask(server, chat, "/v1/chat/completions")
    prediction = {"type": "content", "content": plain["choices"][0]["message"]["content"]}
    predicted = ask(server, chat | {"prediction": prediction}, "/v1/chat/completions")

    assert predicted["choices"] == plain["choices"]
    assert drafts_of(predicted)[0] > drafts_of(plain)[0]


def test_drafts_are_accepted_and_counted(server: ServerProcess) -> None:
    before = server.settled_metrics()

    drafts = [drafts_of(ask(server, {"prompt": prompt, "temperature": 0, **LIKELY})) for prompt in PROMPTS * 3]

    after = server.settled_metrics()
    accepted, name = sum(draft[0] for draft in drafts), "spec_decode_num_accepted_tokens_total"
    assert accepted > 0
    assert after[name] - before.get(name, 0) == accepted


def test_a_worker_that_dies_in_the_middle_changes_no_text(server: ServerProcess) -> None:
    assert_that_a_death_changes_no_text(server, **LIKELY)
