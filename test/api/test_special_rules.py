"""Special sampling options of LightLLM and TGI, with the real default model."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lightserve.tools.watermark import look_for_watermark
from test.api.server import ServerProcess
from test.real_model import LONG, smollm2_tokenizer

pytestmark = pytest.mark.slow

PROMPT = "The quick brown fox jumps over"
TEXT = " ".join(LONG.split())  # words with one space between


def generate(server: ServerProcess, inputs: str, **parameters: Any) -> dict[str, Any]:
    """Send the parameters in LightLLM's or TGI's schema."""
    status, response = server.post("/generate", {"inputs": inputs, "parameters": parameters})
    assert status == 200, response
    return dict(response)


def ids_of(response: dict[str, Any]) -> list[int]:
    tokens = response["tokens"] if "tokens" in response else response["details"]["tokens"]
    return [token["id"] for token in tokens]


def cut_prompts(count: int) -> list[str]:
    """Prefixes of texts that end anywhere, mostly inside words."""
    rng = random.Random(0)
    starts = [rng.randrange(len(TEXT) - 200) for _ in range(count)]
    return [TEXT[start : start + rng.randrange(20, 60)] for start in starts]


def test_a_healed_prompt_plus_its_output_starts_with_the_prompt(server: ServerProcess) -> None:
    prompts = [*cut_prompts(16), "日本の首都は東", "I 😀 yo"]

    status, response = server.post(
        "/v1/completions",
        {"prompt": prompts, "max_tokens": 4, "token_healing": True, "logprobs": 0, "echo": True, "temperature": 0},
    )

    assert status == 200, response
    tokenizer = smollm2_tokenizer()
    for prompt, choice in zip(prompts, response["choices"], strict=True):
        spelled = b"".join(
            bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()
            for token in choice["logprobs"]["tokens"]
        )
        assert choice["text"].startswith(prompt)
        assert spelled.decode(errors="ignore").startswith(prompt)
        assert choice["text"].rstrip("\ufffd").startswith(spelled.decode(errors="ignore")[: len(choice["text"]) - 2])
    assert response["usage"]["prompt_tokens"] < sum(len(tokenizer.encode(prompt)) for prompt in prompts)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [('Look at <a href="http:', "://"), ("print('Hello wor", "world"), ("The capital of Fran", "France")],
)
def test_a_healed_prompt_gets_the_tokens_of_the_whole_word(server: ServerProcess, prompt: str, expected: str) -> None:
    plain = generate(server, prompt, max_new_tokens=4, return_details=True)
    healed = generate(server, prompt, max_new_tokens=4, return_details=True, token_healing=True)

    texts = [smollm2_tokenizer().decode([token]).strip() for token in ids_of(healed)]
    assert expected in texts
    assert expected not in [smollm2_tokenizer().decode([token]).strip() for token in ids_of(plain)]


def test_no_repeat_ngram_size_prevents_repetition(server: ServerProcess) -> None:
    repeated = "one two three " * 4
    prompt_ids = smollm2_tokenizer().encode(repeated)
    response = generate(
        server, repeated, max_new_tokens=20, return_details=True, no_repeat_ngram_size=3, ignore_eos=True
    )

    ids = [*prompt_ids, *ids_of(response)]
    runs = [tuple(ids[i : i + 3]) for i in range(len(ids) - 2)]
    new = runs[len(prompt_ids) - 2 :]
    assert len(set(new)) == len(new)
    assert not set(new) & set(runs[: len(prompt_ids) - 2])


def test_an_exponential_length_penalty_ends_the_output_sooner(server: ServerProcess) -> None:
    plain = generate(server, PROMPT, max_new_tokens=16, ignore_eos=False)
    short = generate(server, PROMPT, max_new_tokens=16, exponential_decay_length_penalty=[3, 2.0])

    assert (plain["finish_reason"], short["finish_reason"]) == ("length", "stop")
    assert 3 < short["count_output_tokens"] < 16


def test_the_output_starts_with_one_of_the_allowed_first_tokens(server: ServerProcess) -> None:
    first = [smollm2_tokenizer().encode(word)[0] for word in (" yes", " no")]

    response = generate(server, PROMPT, max_new_tokens=3, return_details=True, first_allowed_token_ids=first)

    assert ids_of(response)[0] in first
    assert ids_of(response)[1] not in first


def test_a_watermark_is_detected_in_the_output(server: ServerProcess) -> None:
    response = generate(server, PROMPT, max_new_tokens=60, details=True, temperature=1.0, seed=4, watermark=True)

    assert look_for_watermark(ids_of(response)).z_score > 3
