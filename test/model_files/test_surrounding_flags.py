"""Which tokens surround a text in folders that were made for transformers 4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend, models, pre_tokenizers, processors

from lightserve.errors import ModelFilesError
from lightserve.model_files import Tokenizer, load_tokenizer, resolve
from lightserve.model_files.tokenizer.special_tokens import set_surrounding_tokens

BOS, EOS = 151646, 151643  # of DeepSeek-R1-Distill-Qwen-7B
WHO_ARE_YOU = {"Who": 15191, "Ġare": 525, "Ġyou": 498, "?": 30}  # as transformers 4 encodes it there, after BOS
IDS = list(WHO_ARE_YOU.values())
ROLES = {"bos_token": "<begin>", "eos_token": "<end>"}
DEEPSEEK = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": False}
BOTH = {**DEEPSEEK, "add_eos_token": True}


def write_tokenizer(folder: Path, config: dict[str, Any], template: tuple[list[str], list[str]] | None) -> Tokenizer:
    """A folder with a byte-level tokenizer.json. ``template``: the tokens that it adds; None: it is only ByteLevel."""
    vocab = WHO_ARE_YOU | {ROLES["bos_token"]: BOS, ROLES["eos_token"]: EOS}
    backend = Backend(models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_special_tokens(list(ROLES.values()))
    if template is not None:
        set_surrounding_tokens(backend, *template)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(ROLES | config))
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return load_tokenizer(resolve(str(folder), needs_weights=False))


@pytest.mark.parametrize(
    ("config", "template", "expected"),
    [
        (DEEPSEEK, None, [BOS, *IDS]),
        (DEEPSEEK | {"tokenizer_class": "LlamaTokenizer"}, None, [BOS, *IDS]),
        (DEEPSEEK | {"tokenizer_class": "GemmaTokenizerFast"}, None, [BOS, *IDS]),
        (BOTH, None, [BOS, *IDS, EOS]),
        (BOTH, ([ROLES["bos_token"]], []), [BOS, *IDS, EOS]),
        ({"tokenizer_class": "LlamaTokenizer", "add_eos_token": True}, ([ROLES["bos_token"]], []), [BOS, *IDS, EOS]),
        (DEEPSEEK | {"add_bos_token": False}, ([ROLES["bos_token"]], []), IDS),
    ],
)
def test_the_flags_of_a_class_of_transformers_4_decide(
    tmp_path: Path, config: dict[str, Any], template: tuple[list[str], list[str]] | None, expected: list[int]
) -> None:
    tokenizer = write_tokenizer(tmp_path, config, template)

    assert tokenizer.encode("Who are you?") == expected
    assert tokenizer.encode("Who are you?", add_special_tokens=False) == IDS
    assert "add_bos_token" in tokenizer.note


@pytest.mark.parametrize(
    ("config", "template", "expected"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast"}, None, IDS),
        (DEEPSEEK | {"backend": "tokenizers"}, None, IDS),
        (DEEPSEEK | {"tokenizer_class": "PreTrainedTokenizerFast"}, None, IDS),
        (DEEPSEEK | {"tokenizer_class": "Qwen2Tokenizer"}, None, IDS),
        (DEEPSEEK | {"bos_token": None}, None, IDS),
        (DEEPSEEK, ([ROLES["bos_token"]], []), [BOS, *IDS]),
    ],
)
def test_tokenizer_json_decides_in_other_folders(
    tmp_path: Path, config: dict[str, Any], template: tuple[list[str], list[str]] | None, expected: list[int]
) -> None:
    tokenizer = write_tokenizer(tmp_path, config, template)

    assert tokenizer.encode("Who are you?") == expected
    assert tokenizer.note == ""


def test_the_log_shows_how_a_text_is_encoded(tmp_path: Path) -> None:
    note = write_tokenizer(tmp_path, DEEPSEEK, None).note

    assert note.startswith(f"{tmp_path / 'tokenizer_config.json'}: a text is encoded as <begin> text, ")
    assert "\n" not in note


def test_a_flag_that_is_no_boolean_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="add_bos_token is 'yes', not true or false"):
        write_tokenizer(tmp_path, DEEPSEEK | {"add_bos_token": "yes"}, None)
