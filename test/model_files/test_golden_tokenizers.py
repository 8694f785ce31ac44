"""Ids equal those of sentencepiece, tiktoken, mistral-common and transformers, for vocabularies of real models.

``make_golden.py`` says how the files are made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from lightserve.model_files.gguf.header import GgufHeader
from lightserve.model_files.gguf.tokenizer import tokenizer_from_gguf
from lightserve.model_files.tokenizer.files.sentencepiece_file import Piece, PieceType
from lightserve.model_files.tokenizer.folder_tokenizer import tokenizer_from_folder
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from test.model_files.vocabulary_files import sentencepiece_model, write_folder

GOLDEN = {path.stem: path for path in sorted((Path(__file__).parent / "golden").glob("*.json"))}
TIKTOKEN = {
    "tiktoken-qwen": ("qwen.tiktoken", "QWenTokenizer"),
    "tiktoken-kimi": ("tiktoken.model", "TikTokenTokenizer"),
    "tiktoken-llama3": ("tokenizer.model", "ChatGLM4Tokenizer"),  # both split texts alike
}


def backend_of(name: str, golden: dict[str, Any], tmp_path: Path) -> Backend:
    if name.startswith("gguf"):
        names = ("model", "pre", "tokens", "merges", "scores", "token_type")
        metadata = {f"tokenizer.ggml.{field}": golden[field] for field in names if golden.get(field) is not None}
        return tokenizer_from_gguf(GgufHeader(tmp_path, metadata, {}))[0]
    return tokenizer_from_folder(write_folder(tmp_path / "model", files_of(name, golden)))[0]


def files_of(name: str, golden: dict[str, Any]) -> dict[str, Any]:
    if name in TIKTOKEN:
        file, tokenizer_class = TIKTOKEN[name]
        lines = "".join(f"{token} {rank}\n" for rank, token in enumerate(golden["tokens"]))
        return {file: lines, "tokenizer_config.json": {"tokenizer_class": tokenizer_class}}
    if name == "tekken":
        vocab = [{"rank": rank, "token_bytes": token} for rank, token in enumerate(golden["tokens"])]
        config = {"pattern": golden["pattern"], "default_num_special_tokens": 0}
        return {"tekken.json": {"config": config, "vocab": vocab, "special_tokens": []}}
    if name == "sentencepiece":
        pieces = [Piece(text, score, PieceType(kind)) for text, score, kind in golden["pieces"]]
        return {"tokenizer.model": sentencepiece_model(pieces)}
    assert name == "vocab-merges"
    vocabulary = {token: i for i, token in enumerate(golden["tokens"])}
    return {"vocab.json": vocabulary, "merges.txt": "#version: 0.2\n" + "\n".join(golden["merges"]) + "\n"}


@pytest.mark.parametrize("name", GOLDEN)
def test_ids_equal_those_of_the_reference(name: str, tmp_path: Path) -> None:
    golden = json.loads(GOLDEN[name].read_text())
    backend = backend_of(name, golden, tmp_path)

    found = {text: backend.encode(text, add_special_tokens=False).ids for text in golden["texts"]}

    assert found == dict(zip(golden["texts"], golden["ids"], strict=True))


@pytest.mark.parametrize("name", GOLDEN)
def test_streams_return_the_texts(name: str, tmp_path: Path) -> None:
    golden = json.loads(GOLDEN[name].read_text())
    tokenizer = Tokenizer(backend_of(name, golden, tmp_path), SpecialTokens(), None)

    for ids in golden["ids"]:
        stream = tokenizer.decoder.stream(True)
        assert "".join([*map(stream.push, ids), stream.flush()]) == tokenizer.decode(ids)


def test_the_texts_are_many() -> None:
    assert len(GOLDEN) == 14
    assert all(len(json.loads(path.read_text())["texts"]) > 25 for path in GOLDEN.values())
