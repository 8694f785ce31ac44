"""A real server with a model that has no class here: the modules of transformers compute it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from test.api.server import RESPONSE_S, ServerProcess, running_server
from test.models.transformers_backend.tiny_models import CASES, save_with_tokenizer
from test.small_text import small_tokenizer

PROMPT = "abc 123 xyz true " * 4
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["abc", "xyz"]}, "b": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Served(NamedTuple):
    server: ServerProcess
    hf: Any


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its prompts come in chunks of 16 tokens."""
    folder = tmp_path_factory.mktemp("model")
    hf = save_with_tokenizer(replace(CASES["nanochat"]), folder)
    flags = ("--device", "cpu", "--max_total_token_num", "2048", "--batch_max_tokens", "16")
    with running_server(folder / "log", "--model_dir", str(folder), *flags) as server:
        yield Served(server, hf)


def complete(served: Served, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
    status, response = served.server.post("/v1/completions", body)
    assert status == 200, response
    found: dict[str, Any] = response
    return found


def greedy_ids(hf: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = hf.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    new: list[int] = out[0, len(prompt) :].tolist()
    return new


def streamed_text(served: Served, **fields: Any) -> str:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{served.server.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=RESPONSE_S) as response:
        events = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def test_the_server_says_whose_modules_compute_and_that_they_are_slow(served: Served) -> None:
    log = served.server.log

    assert "model_type 'nanochat' has no class here, so the modules of transformers compute it, slowly" in log
    assert "NanoChatForCausalLM in float32 (by the modules of transformers: slow, without fused kernels and" in log


def test_greedy_text_is_that_of_transformers_also_from_the_prefix_cache_and_streamed(served: Served) -> None:
    tokenizer = small_tokenizer()
    expected = greedy_ids(served.hf, tokenizer.encode(PROMPT), 24)

    first = complete(served, return_token_ids=True)
    with served.server.computing() as computed:
        second = complete(served, return_token_ids=True)
    text = streamed_text(served)

    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"] == expected
    assert computed.tokens < len(tokenizer.encode(PROMPT))
    assert first["choices"][0]["text"] == second["choices"][0]["text"] == text


def test_several_choices_are_those_of_their_seeds(served: Served) -> None:
    together = complete(served, n=2, temperature=1.0, seed=7)["choices"]

    again = complete(served, n=2, temperature=1.0, seed=7)["choices"]

    assert [choice["text"] for choice in together] == [choice["text"] for choice in again]
    assert together[0]["text"] != together[1]["text"]


def test_a_json_schema_holds(served: Served) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 80, "response_format": schema, "seed": 1}

    status, response = served.server.post("/v1/chat/completions", body)

    assert status == 200, response
    answer = json.loads(response["choices"][0]["message"]["content"])
    assert answer["a"] in ("abc", "xyz")
    assert set(answer["b"]) <= {1, 2}


def test_logprobs_of_prompt_and_output_are_those_of_transformers(served: Served) -> None:
    ids = small_tokenizer().encode(PROMPT)
    response = complete(served, prompt=ids, max_tokens=1, logprobs=1, echo=True)

    with torch.inference_mode():
        expected = served.hf(torch.tensor([ids])).logits[0].log_softmax(-1)

    found = response["choices"][0]["logprobs"]["token_logprobs"]
    assert found[1 : len(ids)] == pytest.approx([float(expected[i, ids[i + 1]]) for i in range(len(ids) - 1)], abs=1e-3)
    assert found[len(ids)] == pytest.approx(float(expected[-1].max()), abs=1e-3)


def test_beams_are_found(served: Served) -> None:
    response = complete(served, use_beam_search=True, best_of=2, n=2, max_tokens=6, ignore_eos=False)

    texts = [choice["text"] for choice in response["choices"]]
    assert len(set(texts)) == 2
