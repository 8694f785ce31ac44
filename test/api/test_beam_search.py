"""Beam search over HTTP on the real default model: the beams are those of transformers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightserve.httpserver.beam_search.algorithm import BeamParams, BeamResult
from lightserve.io_struct import FinishReason
from test.api.server import ServerProcess
from test.httpserver.beam_search.test_algorithm import transformers_beams
from test.real_model import PROMPTS, smollm2, smollm2_tokenizer, transformers_smollm2

pytestmark = pytest.mark.slow

TEXTS = [
    PROMPTS[0],
    PROMPTS[1],
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
]
PARAMS = BeamParams(num_beams=4, n=4, max_new_tokens=16)


@pytest.fixture(scope="module")
def golden() -> list[list[BeamResult]]:
    hf, tokenizer, ends = transformers_smollm2(), smollm2_tokenizer(), smollm2().eos_token_ids()
    return [transformers_beams(hf, tokenizer.encode(text), PARAMS, ends) for text in TEXTS]


def texts_of(beams: Sequence[BeamResult]) -> list[str]:
    """Without the end token."""
    kept = [one.token_ids[:-1] if one.finish_reason is FinishReason.STOP else one.token_ids for one in beams]
    return [smollm2_tokenizer().decode(ids) for ids in kept]


def test_completions_are_the_beams_of_transformers(server: ServerProcess, golden: list[list[BeamResult]]) -> None:
    body = {"prompt": TEXTS, "use_beam_search": True, "best_of": 4, "n": 4, "max_tokens": 16}

    status, answer = server.post("/v1/completions", body)

    assert status == 200, answer
    everyone = [one for beams in golden for one in beams]
    assert [choice["text"] for choice in answer["choices"]] == [text for beams in golden for text in texts_of(beams)]
    assert [choice["finish_reason"] for choice in answer["choices"]] == [one.finish_reason.value for one in everyone]
    assert answer["usage"]["completion_tokens"] == sum(len(one.token_ids) for one in everyone)
    assert any(one.finish_reason is FinishReason.STOP for one in everyone)


@pytest.mark.parametrize("index", range(len(TEXTS)))
def test_generate_gives_the_best_beams(server: ServerProcess, golden: list[list[BeamResult]], index: int) -> None:
    body = {"inputs": TEXTS[index], "parameters": {"num_beams": 4, "n": 2, "max_new_tokens": 16}}

    status, answer = server.post("/generate", body)

    assert status == 200, answer
    assert answer["generated_text"] == texts_of(golden[index][:2])
    assert answer["count_output_tokens"] == [len(one.token_ids) for one in golden[index][:2]]


def test_beams_compute_each_token_once_and_leave_nothing(server: ServerProcess) -> None:
    """Also where the prompt is shared with nobody."""
    parameters = {"num_beams": 4, "max_new_tokens": 8, "ignore_eos": True, "disable_prompt_cache": True}
    body = {"inputs": list(range(1000, 1100)), "parameters": parameters}

    with server.computing() as computed:
        status, answer = server.post("/generate", body)

    assert status == 200, answer
    assert computed.tokens == 100 + 7 * 4
    assert server.metrics()["kv_used_tokens"] == 0
