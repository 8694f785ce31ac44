"""/tokenize, /detokenize and /tokens, over a socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightserve.model_files.model_summary import ModelDetails
from test.httpserver.fake_engine import spell
from test.httpserver.generate_server import Served, serve
from test.real_model import smollm2_tokenizer as smol

TEXTS = ["", "Hello world", "naïve 日本 👩‍👩‍👧\n\x00", "<|im_start|>user\nhi<|im_end|>"]
MESSAGES = [{"role": "user", "content": "Hi!"}]


def test_tokenize_responds_in_vllms_format(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        for text in TEXTS:
            response = await served.post("/tokenize", {"model": "tiny", "prompt": text})
            ids = smol().encode(text)
            assert response.json == {"count": len(ids), "max_model_len": 1024, "tokens": ids, "token_strs": None}

        response = await served.post("/tokenize", {"prompt": "Hello world", "return_token_strs": True})
        assert response.json["token_strs"] == ["Hello", "Ġworld"]

    serve(scenario, tmp_path, spell("x"))


def test_a_long_prompt_is_tokenized_too(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        response = await served.post("/tokenize", {"prompt": "one two three " * 1000})

        assert response.json["tokens"] == smol().encode("one two three " * 1000)

    serve(scenario, tmp_path, spell("x"))


def test_tokenize_applies_the_chat_template(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        whole = await served.post("/tokenize", {"messages": MESSAGES})
        bare = await served.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})

        assert smol().decode(whole.json["tokens"], False) == smol().apply_chat_template(MESSAGES)
        assert smol().decode(bare.json["tokens"], False) == smol().apply_chat_template(
            MESSAGES, add_generation_prompt=False
        )

    serve(scenario, tmp_path, spell("x"))


def test_tokenize_responds_in_tgis_format_to_inputs(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        for text in TEXTS:
            tokens = (await served.post("/tokenize", {"inputs": text})).json
            assert [token["id"] for token in tokens] == smol().encode(text)
            assert all(token["text"] == text[token["start"] : token["stop"]] for token in tokens)
        hello = await served.post("/tokenize", {"inputs": "Hello world", "parameters": {"details": True}})
        assert hello.json == [
            {"id": 19556, "text": "Hello", "start": 0, "stop": 5},
            {"id": 905, "text": " world", "start": 5, "stop": 11},
        ]
        bad = await served.post("/tokenize", {"inputs": 5})
        assert (bad.status, bad.json["error_type"]) == (422, "validation")

    serve(scenario, tmp_path, spell("x"))


def test_chat_tokenize_responds_in_tgis_format(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        response = await served.post("/chat_tokenize", {"model": "tgi", "messages": MESSAGES})

        text = smol().apply_chat_template(MESSAGES)
        tokens = response.json["tokenize_response"]
        assert response.json["templated_text"] == text
        assert [token["id"] for token in tokens] == smol().encode(text, add_special_tokens=False)
        assert all(text[token["start"] : token["stop"]] == token["text"] for token in tokens)
        refused = await served.post("/chat_tokenize", {"messages": []})
        assert (refused.status, refused.json["error_type"]) == (422, "validation")

    serve(scenario, tmp_path, spell("x"))


def test_the_tokenizers_settings_are_those_of_its_files(tmp_path: Path) -> None:
    config = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 8192, "chat_template": "old"}
    details = ModelDetails("safetensors", "BF16", 1, 2, 3.0, {}, config)

    async def scenario(served: Served) -> None:
        bare = await served.get("/tokenizer_info")
        object.__setattr__(served.context, "details", details)
        found = await served.get("/tokenizer_info")

        assert bare.json["chat_template"] == smol().chat_template
        assert bare.json["eos_token"] == "<|im_end|>"
        assert found.json == {**bare.json, **config, "chat_template": smol().chat_template}

    serve(scenario, tmp_path, spell("x"))


def test_detokenize_undoes_tokenize(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        for text in [*TEXTS, "long " * 3000]:
            response = await served.post("/detokenize", {"tokens": smol().encode(text)})
            assert response.json == {"prompt": text}

    serve(scenario, tmp_path, spell("x"))


def test_tokens_returns_the_count(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        body = {"text": "Hello world", "parameters": {"add_special_tokens": False}, "multimodal_params": {}}

        assert (await served.post("/tokens", body)).json == {"ntokens": 2}
        assert (await served.post("/tokens", body, method="GET")).json == {"ntokens": 2}
        assert (await served.post("/tokens", {"text": ""})).json == {"ntokens": 0}

    serve(scenario, tmp_path, spell("x"))


BAD: list[tuple[str, Any]] = [
    ("/tokenize", {}),
    ("/tokenize", {"prompt": None}),
    ("/tokenize", {"prompt": 5}),
    ("/tokenize", {"prompt": ["a"]}),
    ("/tokenize", {"prompt": "x", "messages": MESSAGES}),
    ("/tokenize", {"prompt": "x", "add_special_tokens": 1}),
    ("/tokenize", {"prompt": "x" * 1_000_000}),
    ("/tokenize", {"messages": []}),
    ("/tokenize", {"messages": "hi"}),
    ("/tokenize", {"messages": [{"role": "two words", "content": "x"}]}),
    ("/tokenize", {"messages": [{"role": "user", "content": None}]}),
    ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}),
    ("/tokenize", {"messages": MESSAGES, "tools": [{"type": "function"}]}),
    ("/detokenize", {}),
    ("/detokenize", {"tokens": "1"}),
    ("/detokenize", {"tokens": [-1]}),
    ("/detokenize", {"tokens": [49152]}),
    ("/detokenize", {"tokens": [2**70]}),
    ("/detokenize", {"tokens": [True]}),
    ("/detokenize", {"tokens": [1.5]}),
    ("/detokenize", {"tokens": [1] * 1_000_001}),
    ("/tokens", {}),
    ("/tokens", {"text": 5}),
    ("/tokens", {"text": "x", "parameters": 5}),
    ("/tokens", {"text": "x", "parameters": {"add_special_tokens": "no"}}),
    ("/tokens", {"text": "x", "multimodal_params": {"images": [{"type": "image_size", "data": [1, 1]}]}}),
]


def test_bad_input_is_refused_with_400(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        for path, body in BAD:
            response = await served.post(path, body)
            assert response.status == 400, (path, str(body)[:100], response.status, response.body[:300])
            assert set(response.json["error"]) == {"message", "type", "param", "code"}

    serve(scenario, tmp_path, spell("x"))


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_another_model_is_not_found(tmp_path: Path, path: str) -> None:
    async def scenario(served: Served) -> None:
        response = await served.post(path, {"model": "other", "prompt": "x", "tokens": [1]})

        assert (response.status, response.json["error"]["code"]) == (404, "model_not_found")

    serve(scenario, tmp_path, spell("x"))
