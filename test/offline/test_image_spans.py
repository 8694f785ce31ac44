"""Prompts whose tokens see later ones, in an LLM without a server. The oracle is transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightserve import LLM
from lightserve.errors import InvalidRequestError
from test.vision_families import END, PAD, START, VOCAB_SIZE, greedy, save_family
from test.vision_model import picture

FIELDS: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
PROMPTS = {"gemma3": [1, PAD, 5, 2], "paligemma": [PAD, START, 5]}


@pytest.fixture(scope="module", params=PROMPTS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any, LLM]]:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_family(folder, request.param)
    flags: dict[str, Any] = {"batch_max_tokens": 30, "max_total_token_num": 600, "embed_cache_gb": 0.01}
    with LLM(str(folder), device="cpu", **flags) as llm:
        yield request.param, model, llm


def test_text_after_an_image_is_that_of_transformers(served: tuple[str, Any, LLM]) -> None:
    name, model, llm = served
    image = picture(90, 120, 4)
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "w5"}]

    texts = [llm.chat([[{"role": "user", "content": parts}]], **FIELDS)[0].text for _ in range(2)]

    ids = greedy(model, name, PROMPTS[name], [image], 6)
    assert texts == [" ".join(f"w{token_id}" for token_id in ids if token_id < VOCAB_SIZE)] * 2


def test_a_prompt_that_no_step_can_compute_at_once_is_refused(served: tuple[str, Any, LLM]) -> None:
    name, _, llm = served
    image = picture(60, 60)
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "w5 " * 280}]
    if name == "gemma3":  # only its images are spans
        assert llm.chat([[{"role": "user", "content": parts}]], **FIELDS)[0].text
        return

    with pytest.raises(InvalidRequestError, match="tokens of the prompt have to be computed in one step"):
        llm.chat([[{"role": "user", "content": parts}]], **FIELDS)


def test_newlines_beside_an_image_become_the_tokens_that_they_do_over_http(tmp_path: Path) -> None:
    """Gemma 3 has two before and behind an image, and one that follows in the text may join them in one token."""
    save_family(tmp_path, "gemma3")
    file = tmp_path / "tokenizer.json"
    values = json.loads(file.read_text())
    words = values["model"]["vocab"]
    for word, text in {"w100": "\n\n", "w101": "\n\n\n"}.items():
        words[text] = words.pop(word)
    split = {"type": "Split", "pattern": {"Regex": "\n+"}, "behavior": "Isolated", "invert": False}
    spaces = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, spaces]}
    file.write_text(json.dumps(values))
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("<start_of_image> ", "<start_of_image>"))  # no space behind it
    parts = [{"type": "image", "image": picture(60, 60)}, {"type": "text", "text": "\nw5"}]

    with LLM(str(tmp_path), device="cpu", max_total_token_num=600, embed_cache_gb=0.01) as llm:
        (ids,) = llm.chat_prompts([[{"role": "user", "content": parts}]])

    last = len(ids) - ids[::-1].index(PAD)
    assert ids[last:] == [END, 101, 5, 2]
