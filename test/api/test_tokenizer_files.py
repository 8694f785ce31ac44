"""Real servers with folders that have no tokenizer.json: a SentencePiece model, or a tokenizer in Python."""

from __future__ import annotations

import codecs
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmark.models import TINY
from lightserve.model_files import Tokenizer, load_tokenizer, resolve
from lightserve.model_files.tokenizer.files.sentencepiece_file import Piece, PieceType
from test.api.server import RESPONSE_S, ServerProcess, running_server
from test.model_files.test_remote_code import CONFIG, make_folder
from test.model_files.vocabulary_files import sentencepiece_model, write_folder

GOLDEN = Path(__file__).parents[1] / "model_files" / "golden" / "sentencepiece.json"
TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "Hello, world! 日本"}], "seed": 1, "temperature": 1.0}
LONG = {"max_tokens": 60, "ignore_eos": True, "return_token_ids": True}


def replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("replace each byte", replace_each_byte)


def pieces_of_golden() -> list[Piece]:
    return [Piece(text, score, PieceType(kind)) for text, score, kind in json.loads(GOLDEN.read_text())["pieces"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pieces = pieces_of_golden()
    config = {"model_type": "llama", "vocab_size": len(pieces), "max_position_embeddings": 512, "rms_norm_eps": 1e-5}
    files = {
        "config.json": config | {"architectures": ["LlamaForCausalLM"]} | TINY,
        "tokenizer.model": sentencepiece_model(pieces),
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "chat_template": TEMPLATE},
    }
    return write_folder(tmp_path_factory.mktemp("models") / "spm", files)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    flags = ["--model_dir", str(folder), "--load_format", "dummy", "--max_total_token_num", "4096"]
    with running_server(folder.parent / "log", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(resolve(str(folder), needs_weights=False))


def text_of(ids: list[int]) -> str:
    """Bytes that are no character are replaced one by one, as in SentencePiece itself."""
    pieces = [pieces_of_golden()[token_id] for token_id in ids]
    data = b"".join(
        bytes.fromhex(piece.text[3:5]) if piece.type == PieceType.BYTE else piece.text.replace("▁", " ").encode()
        for piece in pieces
        if piece.type in (PieceType.BYTE, PieceType.NORMAL, PieceType.USER_DEFINED)
    )
    return data.decode(errors="replace each byte").removeprefix(" ")


def test_a_chat_is_rendered_encoded_and_decoded(server: ServerProcess, tokenizer: Tokenizer) -> None:
    status, answer = server.post("/v1/chat/completions", CHAT | LONG)

    assert status == 200, answer
    prompt = "<s>[INST] Hello, world! 日本 [/INST]"
    assert answer["prompt_token_ids"] == tokenizer.encode(prompt, add_special_tokens=False)
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == 60
    assert choice["message"]["content"] == text_of(choice["token_ids"])


def test_a_stream_has_the_same_text(server: ServerProcess) -> None:
    _, whole = server.post("/v1/chat/completions", CHAT | LONG)
    body = json.dumps(CHAT | LONG | {"stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"})

    with urllib.request.urlopen(request, timeout=RESPONSE_S) as response:
        lines = [line.removeprefix(b"data: ") for line in response if line.startswith(b"data: {")]
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]

    texts = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert "".join(texts) == whole["choices"][0]["message"]["content"]


def test_a_completion_continues_its_prompt_with_the_space_between_words(
    server: ServerProcess, tokenizer: Tokenizer
) -> None:
    world = tokenizer.token_to_id("▁world")
    body = {"prompt": "Hello,", "max_tokens": 1, "allowed_token_ids": [world], "echo": True}

    _, answer = server.post("/v1/completions", body)
    _, chat = server.post("/v1/chat/completions", CHAT | {"max_tokens": 1, "allowed_token_ids": [world]})

    assert answer["choices"][0]["text"] == "Hello, world"
    assert chat["choices"][0]["message"]["content"] == "world"


def test_structured_output_uses_the_vocabulary(server: ServerProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 22]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    status, answer = server.post("/v1/chat/completions", CHAT | {"max_tokens": 60, "response_format": grammar})

    assert status == 200, answer
    assert json.loads(answer["choices"][0]["message"]["content"])["a"] in (1, 22)


def test_the_end_token_comes_from_the_model_file(server: ServerProcess) -> None:
    _, answer = server.post("/v1/completions", {"prompt": "Hello", "allowed_token_ids": [2], "max_tokens": 5})

    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "Traceback" not in server.log


def test_a_tokenizer_in_python_code_serves_text_without_torch_in_the_http_process(tmp_path: Path) -> None:
    files = {"tokenizer_config.json": CONFIG | {"chat_template": "{{ messages[0].content }}"}}
    folder = write_folder(make_folder(tmp_path / "words"), files)
    config = {"model_type": "llama", "vocab_size": 6, "max_position_embeddings": 512, "rms_norm_eps": 1e-5} | TINY
    write_folder(folder, {"config.json": config | {"architectures": ["LlamaForCausalLM"]}})
    flags = ["--model_dir", str(folder), "--load_format", "dummy", "--trust_remote_code"]
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3, "allowed_token_ids": [1, 4]}

    with running_server(tmp_path / "log", *flags, env={"HF_HOME": str(tmp_path)}) as server:
        status, answer = server.post("/v1/chat/completions", body | {"return_token_ids": True})
        refused, error = server.post("/v1/chat/completions", body | {"guided_regex": "a+"})
        loaded = [
            entry.path
            for one in server.processes()["ls-httpserver"]
            for entry in one.memory_maps()
            if "torch" in entry.path
        ]

    assert status == 200, answer
    assert answer["prompt_token_ids"] == [1, 2, 3]
    letters = "".join({1: "a", 4: " "}[one] for one in answer["choices"][0]["token_ids"])
    assert answer["choices"][0]["message"]["content"] == letters
    assert loaded == []
    assert (refused, error["error"]["message"]) == (
        400,
        "guided_regex: structured output is not possible with this model's tokenizer: it is Python code",
    )
