"""Draft heads through the server: two ranks give the text of one without drafts, also after a worker has died."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightserve.offline.llm import LLM
from test.api.server import ServerProcess, running_server
from test.api.test_speculation import PROMPTS, ask, assert_that_a_death_changes_no_text, drafts_of
from test.worker.heads import save_head
from test.worker.test_mtp import save_model as save_mtp_model

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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Of a model, and of a head that names it."""
    from test.small_text import save_small_model  # here, because it imports transformers

    folder = tmp_path_factory.mktemp("small")
    save_small_model(folder, context_len=1024)
    model = json.loads((folder / "config.json").read_text())
    speculators = {
        "verifier": {"name_or_path": str(folder)},
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 2}],
        "default_proposal_method": "greedy",
    }
    head = tmp_path_factory.mktemp("head")
    save_head(head, model["vocab_size"], model["hidden_size"], DRAFTED_IDS, True, speculators_config=speculators)
    return str(folder), str(head)


@pytest.fixture(scope="module")
def server(folders: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """``--model_dir`` is the head."""
    log = tmp_path_factory.mktemp("server") / "log"
    common = ("--device", "cpu", "--dtype", "float32", "--max_total_token_num", "4096", "--kv_ram_gb", "0.1")
    with running_server(log, "--model_dir", folders[1], *common, "--tp", "2") as server:
        yield server


@pytest.fixture(scope="module")
def plain(folders: tuple[str, str]) -> LLM:
    return LLM(folders[0], device="cpu", data_type="float32", max_total_token_num=4096)


def test_a_head_as_model_dir_serves_its_model(server: ServerProcess, folders: tuple[str, str]) -> None:
    assert f"eagle3 by {folders[1]}, up to 2 drafts a step" in server.log
    assert ask(server, {"prompt": PROMPTS[0]})["model"] == Path(folders[0]).name


def test_an_mtp_layer_drafts_the_same_on_two_ranks(tmp_path: Path) -> None:
    save_mtp_model(tmp_path / "model", "glm4_moe")
    flags = ("--device", "cpu", "--dtype", "float32", "--max_total_token_num", "2048")
    sampling: dict[str, Any] = {"temperature": 2.0, "seed": 5}
    expected = LLM(str(tmp_path / "model"), device="cpu", data_type="float32", max_total_token_num=2048).generate(
        PROMPTS, max_new_tokens=40, ignore_eos=True, **sampling
    )

    accepted = 0
    config = ("--speculative_config", "auto")
    with running_server(
        tmp_path / "log", "--model_dir", str(tmp_path / "model"), *flags, *config, "--tp", "2"
    ) as server:
        assert "mtp, up to 3 drafts a step" in server.log
        for prompt, generation in zip(PROMPTS, expected, strict=True):
            response = ask(server, {"prompt": prompt, "return_token_ids": True, **sampling})
            assert response["choices"][0]["token_ids"] == generation.token_ids
            accepted += drafts_of(response)[0]
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


def test_drafts_are_accepted_and_counted(server: ServerProcess) -> None:
    before = server.settled_metrics()

    drafts = [drafts_of(ask(server, {"prompt": prompt, "temperature": 0, **LIKELY})) for prompt in PROMPTS * 3]

    after = server.settled_metrics()
    accepted, name = sum(draft[0] for draft in drafts), "spec_decode_num_accepted_tokens_total"
    assert accepted > 0
    assert after[name] - before.get(name, 0) == accepted


def test_a_worker_that_dies_in_the_middle_changes_no_text(server: ServerProcess) -> None:
    assert_that_a_death_changes_no_text(server, **LIKELY)
