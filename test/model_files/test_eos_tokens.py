"""Which tokens end a response, by the files of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models

from lightserve.errors import ModelFilesError
from lightserve.model_files import resolve
from test.model_files.files import VOCAB, save_as_gguf, tiny_model

CONTROL, USER_DEFINED, NORMAL = 3, 4, 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends with 2, and whose tokenizer has <|im_end|> as 7 and </s> as 1."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    backend = tokenizers.Tokenizer(models.WordLevel({"</s>": 1, **{f"t{i}": i for i in (0, 2, 3, 4, 5, 6)}}, "t0"))
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    assert backend.token_to_id("<|im_end|>") == 7
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"eos_token": "<|im_end|>"}, (2, 7)),
        ({"eos_token": {"content": "<|im_end|>", "special": True}}, (2, 7)),
        ({"eos_token": "</s>"}, (1, 2)),  # not an added token
        ({"eos_token": "<gone>", "added_tokens_decoder": {"9": {"content": "<gone>"}}}, (2, 9)),
        ({"eos_token": "<gone>"}, (2,)),
        ({"eos_token": None}, (2,)),
    ],
)
def test_the_tokenizers_eos_token_ends_a_response(saved: Path, config: dict[str, Any], expected: tuple[int]) -> None:
    (saved / "tokenizer_config.json").write_text(json.dumps(config))

    assert resolve(str(saved)).eos_token_ids() == expected


def test_special_tokens_map_names_the_eos_token_too(saved: Path) -> None:
    (saved / "tokenizer_config.json").write_text("{}")
    (saved / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))

    assert resolve(str(saved)).eos_token_ids() == (2, 7)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_file_is_named(tmp_path: Path, saved: Path, name: str) -> None:
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / name).write_text("[1")

    with pytest.raises(ModelFilesError, match=name):
        resolve(str(tmp_path), needs_weights=False).eos_token_ids()


@pytest.mark.parametrize(
    ("texts", "metadata", "expected"),
    [
        ({7: ("<|im_end|>", CONTROL)}, {"tokenizer.ggml.eot_token_id": 9}, (2, 7, 9)),
        ({5: ("<|endoftext|>", CONTROL), 7: ("<end_of_turn>", USER_DEFINED)}, {}, (2, 5, 7)),
        ({}, {"tokenizer.ggml.eom_token_id": 11}, (2, 11)),
        ({5: ("</s>", NORMAL)}, {}, (2,)),
        ({5: ("<|end|>", CONTROL)}, {}, (2, 5)),
        ({5: ("<|end|>", CONTROL), 6: ("<|return|>", CONTROL), 7: ("<|call|>", CONTROL)}, {}, (2, 6, 7)),
    ],
)
def test_the_end_tokens_of_llama_cpp_end_a_response(
    texts: dict[int, tuple[str, int]], metadata: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    tokens, types = [f"t{i}" for i in range(VOCAB)], [NORMAL] * VOCAB
    for token_id, (text, kind) in texts.items():
        tokens[token_id], types[token_id] = text, kind
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, **metadata}
    path = save_as_gguf(tiny_model("llama"), tmp_path / "model.gguf", metadata)

    assert resolve(str(path)).eos_token_ids() == expected
