"""Beam search over HTTP with the real default model gives the beams of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lightserve.messages.params import FinishReason
from lightserve.offline.llm import LLM
from lightserve.text.beam_search import BeamParams, BeamResult
from test.api.server import ServerProcess, running_server
from test.real_model import PROMPTS, smollm2, smollm2_tokenizer, transformers_smollm2
from test.small_text import save_small_model
from test.text.test_beam_search import transformers_beams

pytestmark = pytest.mark.slow

TEXTS = [
    PROMPTS[0],
    PROMPTS[1],
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
]
PARAMS = BeamParams(num_beams=4, n=4, max_new_tokens=10)


@pytest.fixture(scope="module")
def golden() -> list[list[BeamResult]]:
    hf, tokenizer, ends = transformers_smollm2(), smollm2_tokenizer(), smollm2().eos_token_ids()
    return [transformers_beams(hf, tokenizer.encode(text), PARAMS, ends) for text in TEXTS]


def texts_of(beams: Sequence[BeamResult]) -> list[str]:
    """The texts without end tokens."""
    kept = [one.token_ids[:-1] if one.finish_reason is FinishReason.STOP else one.token_ids for one in beams]
    return [smollm2_tokenizer().decode(ids) for ids in kept]


def test_completions_are_the_beams_of_transformers(exact_server: ServerProcess, golden: list[list[BeamResult]]) -> None:
    body = {"prompt": TEXTS, "use_beam_search": True, "best_of": 4, "n": 4, "max_tokens": 10}

    status, response = exact_server.post("/v1/completions", body)

    assert status == 200, response
    everyone = [one for beams in golden for one in beams]
    assert [choice["text"] for choice in response["choices"]] == [text for beams in golden for text in texts_of(beams)]
    assert [choice["finish_reason"] for choice in response["choices"]] == [one.finish_reason.value for one in everyone]
    assert response["usage"]["completion_tokens"] == sum(len(one.token_ids) for one in everyone)
    assert any(one.finish_reason is FinishReason.STOP for one in everyone)


@pytest.mark.parametrize("index", range(len(TEXTS)))
def test_generate_gives_the_best_beams(exact_server: ServerProcess, golden: list[list[BeamResult]], index: int) -> None:
    body = {"inputs": TEXTS[index], "parameters": {"num_beams": 4, "n": 2, "max_new_tokens": 10}}

    status, response = exact_server.post("/generate", body)

    assert status == 200, response
    assert response["generated_text"] == texts_of(golden[index][:2])
    assert response["count_output_tokens"] == [len(one.token_ids) for one in golden[index][:2]]


def test_beams_end_at_the_end_tokens_of_the_operator(tmp_path: Path) -> None:
    """The first token of the best beam becomes an end token: then a beam ends with it."""
    model_dir = save_small_model(tmp_path)
    llm = LLM(model_dir=model_dir, device="cpu", max_total_token_num=1024)
    (beams,) = llm.beam_search(["abc"], BeamParams(num_beams=2, n=2, max_new_tokens=4, ignore_eos=True))
    eos_id = str(beams[0].token_ids[0])
    body = {"prompt": "abc", "use_beam_search": True, "best_of": 2, "n": 2, "max_tokens": 4}

    with running_server(tmp_path / "log", "--model_dir", model_dir, "--device", "cpu", "--eos_id", eos_id) as server:
        status, response = server.post("/v1/completions", body)

    assert status == 200, response
    assert "stop" in [choice["finish_reason"] for choice in response["choices"]]


def test_beams_compute_each_token_once_and_free_their_memory(exact_server: ServerProcess) -> None:
    """This also holds without the prefix cache."""
    parameters = {"num_beams": 4, "max_new_tokens": 8, "ignore_eos": True, "disable_prompt_cache": True}
    body = {"inputs": list(range(1000, 1100)), "parameters": parameters}

    with exact_server.computing() as computed:
        status, response = exact_server.post("/generate", body)

    assert status == 200, response
    assert computed.tokens == 100 + 7 * 4
    assert exact_server.metrics()["kv_used_tokens"] == 0
