"""Vocabularies of bytes: files of tiktoken, tekken.json, and vocab.json with merges.txt."""

from __future__ import annotations

import base64
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from lightserve.errors import ModelFilesError
from lightserve.model_files import load_tokenizer
from lightserve.model_files.source import FolderSource
from lightserve.model_files.tokenizer.eos_tokens import eos_tokens_of_folder
from lightserve.model_files.tokenizer.files.byte_pairs import to_byte_level
from lightserve.model_files.tokenizer.folder_tokenizer import tokenizer_from_folder
from test.model_files.vocabulary_files import ALL_BYTES, tiktoken_file, write_folder

TOKENS = [*ALL_BYTES, b"he", b"ll", b" w", b"or", b"hell", b"ld", b" wor", "é".encode(), b"12", b"123"]
REMOTE_CODE = {"auto_map": {"AutoTokenizer": ["tokenization.Tokenizer", None]}}


def load(tmp_path: Path, files: dict[str, Any]) -> Backend:
    return tokenizer_from_folder(write_folder(tmp_path / "model", files))[0]


def tokens_of(backend: Backend, text: str) -> list[str]:
    return list(backend.encode(text).tokens)


def test_a_tiktoken_file_merges_by_rank(tmp_path: Path) -> None:
    backend = load(tmp_path, {"tokenizer.model": tiktoken_file(TOKENS)})

    assert tokens_of(backend, "hello world") == ["hell", "o", "Ġwor", "ld"]
    assert tokens_of(backend, "12345") == ["123", "4", "5"]
    assert backend.decode(backend.encode("hé😀").ids) == "hé😀"


def test_a_part_that_is_a_token_needs_no_merges(tmp_path: Path) -> None:
    backend = load(tmp_path, {"tokenizer.model": tiktoken_file([*TOKENS, b"xyz"])})

    assert tokens_of(backend, "xyz") == ["xyz"]
    assert tokens_of(backend, "axyz") == ["a", "x", "y", "z"]


def merged_by_rank(data: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The definition of tiktoken: the pair with the lowest rank merges first; of equal ones the leftmost."""
    parts = [data[i : i + 1] for i in range(len(data))]
    while data not in ranks:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not pairs:
            break
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [ranks[data]] if data in ranks else [ranks[part] for part in parts]


def random_vocabulary(rng: random.Random) -> list[bytes]:
    """Tokens that are made of earlier ones, as training makes them."""
    tokens = [b"a", b"b", b"c"]
    while len(tokens) < 20:
        token = rng.choice(tokens) + rng.choice(tokens)
        if token not in tokens and len(token) < 9:
            tokens.append(token)
    return [*ALL_BYTES, *tokens[3:]]


def test_merges_of_random_vocabularies_follow_the_definition(tmp_path: Path) -> None:
    rng = random.Random(0)
    for number in range(20):
        tokens = random_vocabulary(rng)
        ranks = {token: rank for rank, token in enumerate(tokens)}
        backend = load(tmp_path / str(number), {"tokenizer.model": tiktoken_file(tokens)})

        for _ in range(100):
            text = "".join(rng.choices("abc", k=rng.randrange(1, 30)))
            assert backend.encode(text).ids == merged_by_rank(text.encode(), ranks), (tokens[256:], text)


@pytest.mark.parametrize(
    ("file", "tokenizer_class", "text", "tokens"),
    [
        ("qwen.tiktoken", "QWenTokenizer", "<|im_start|>e\u0301 12", ["<|im_start|>", "Ã©", "Ġ", "1", "2"]),
        ("qwen.tiktoken", None, "12<|im_end|>", ["1", "2", "<|im_end|>"]),
        ("tokenizer.model", "ChatGLM4Tokenizer", "12<|user|>", ["[gMASK]", "<sop>", "12", "<|user|>"]),
        ("tiktoken.model", "TikTokenTokenizer", "12", ["12"]),
        ("tiktoken.model", None, "or中ld", ["or", "ä", "¸", "Ń", "ld"]),  # noqa: RUF001
        ("arcade100k.tiktoken", "Arcade100kTokenizer", "<|im_end|>12", ["<|im_end|>", "1", "2"]),
    ],
)
def test_a_family_has_its_split_and_special_tokens(
    file: str, tokenizer_class: str | None, text: str, tokens: list[str], tmp_path: Path
) -> None:
    config = {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class, **REMOTE_CODE}

    backend = load(tmp_path, {file: tiktoken_file(TOKENS), "tokenizer_config.json": config})

    assert tokens_of(backend, text) == tokens


@pytest.mark.parametrize(
    ("file", "token", "offset"),
    [("qwen.tiktoken", "<|im_end|>", 2), ("qwen.tiktoken", "<|extra_204|>", 207), ("tiktoken.model", "[EOS]", 5)],
)
def test_special_tokens_follow_the_ranks(file: str, token: str, offset: int, tmp_path: Path) -> None:
    """Kimi's config names some of the 256 reserved ids."""
    named = {str(len(TOKENS) + 5): {"content": "[EOS]", "special": True}} if file == "tiktoken.model" else {}
    files = {file: tiktoken_file(TOKENS), "tokenizer_config.json": {"added_tokens_decoder": named}}

    backend = load(tmp_path, files)

    assert backend.token_to_id(token) == len(TOKENS) + offset
    assert backend.get_vocab_size() == len(TOKENS) + (256 if named else 208)


def test_the_config_may_leave_ids_free_between_ranks_and_special_tokens(tmp_path: Path) -> None:
    named = {"1000": {"content": "<|end|>", "special": True}}
    files = {"tokenizer.model": tiktoken_file(TOKENS), "tokenizer_config.json": {"added_tokens_decoder": named}}

    assert load(tmp_path, files).encode("or<|end|>").ids == [259, 1000]


def test_the_end_token_of_a_tiktoken_folder_is_found(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"qwen.tiktoken": tiktoken_file(TOKENS), "config.json": {}})

    assert eos_tokens_of_folder(folder) == (len(TOKENS),)


def test_a_chat_model_of_qwen_1_has_the_template_and_the_end_token_of_its_format(tmp_path: Path) -> None:
    files = {
        "qwen.tiktoken": tiktoken_file(TOKENS),
        "config.json": {},
        "generation_config.json": {"chat_format": "chatml"},
    }
    folder = write_folder(tmp_path, files)

    tokenizer = load_tokenizer(FolderSource("qwen", folder))

    assert eos_tokens_of_folder(folder) == (len(TOKENS), len(TOKENS) + 2)
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    user = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]) == system + user


TIKTOKEN = tiktoken_file(TOKENS)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (TIKTOKEN.replace(b"aGU= 256", b"a*U= 256"), "line 257: "),
        (TIKTOKEN.replace(b"aGU= 256", b"aGU 256"), "line 257: Incorrect padding"),
        (TIKTOKEN.replace(b"aGU= 256", b"aGU= x"), "line 257: invalid literal"),
        (TIKTOKEN.replace(b"aGU= 256\n", b""), "rank 256 is missing or occurs twice among 265 ranks"),
        (TIKTOKEN.replace(b"aGU= 256", b"aGU= 257"), "rank 256 is missing or occurs twice"),
        (TIKTOKEN[:-6], "rank 265 is missing|line 266"),
        (tiktoken_file([*TOKENS[1:]]), "the byte 0x00 has no rank"),
    ],
)
def test_a_damaged_tiktoken_file_is_refused_in_one_line(content: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=reason) as caught:
        load(tmp_path, {"qwen.tiktoken": content})

    assert str(caught.value).startswith(str(tmp_path / "model" / "qwen.tiktoken") + ": ")
    assert "\n" not in str(caught.value)


def test_a_token_that_a_family_needs_must_be_there(tmp_path: Path) -> None:
    named = {"500": {"content": "<|user|>", "special": True}}
    config = {"tokenizer_class": "ChatGLM4Tokenizer", "added_tokens_decoder": named, **REMOTE_CODE}

    with pytest.raises(ModelFilesError, match=r"every text has the token '\[gMASK\]', which tokenizer.model does not"):
        load(tmp_path, {"tokenizer.model": TIKTOKEN, "tokenizer_config.json": config})


def tekken(tokens: Sequence[bytes] = TOKENS, special: int = 3, **config: Any) -> dict[str, Any]:
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(tokens)]
    names = ["<unk>", "<s>", "</s>"]
    return {
        "config": {"pattern": r"\p{L}+|\p{N}|.", "default_num_special_tokens": special} | config,
        "vocab": vocab,
        "special_tokens": [{"rank": rank, "token_str": name} for rank, name in enumerate(names)],
    }


def test_tekken_has_its_special_tokens_before_the_ranks(tmp_path: Path) -> None:
    backend = load(tmp_path, {"tekken.json": tekken(special=5)})

    assert backend.encode("12</s>").ids == [1, 5 + ord("1"), 5 + ord("2"), 2]
    assert backend.token_to_id("<SPECIAL_4>") == 4
    assert backend.decode([5 + TOKENS.index(b"hell"), 2]) == "hell"


def test_tekken_may_list_more_tokens_than_the_model_has(tmp_path: Path) -> None:
    backend = load(tmp_path, {"tekken.json": tekken(default_vocab_size=3 + len(TOKENS) - 6)})

    assert backend.get_vocab_size() == 3 + len(TOKENS) - 6
    assert tokens_of(backend, "hell") == ["<s>", "he", "ll"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, "no 'config'"),
        (tekken() | {"vocab": [{"rank": 0}]}, "no 'token_bytes'"),
        (tekken() | {"special_tokens": [{"rank": 7, "token_str": "<s>"}]}, "do not have the ids from 0 to 2"),
        (tekken(TOKENS[:200]), "the byte 0xC8 has no rank"),
        (tekken(pattern="("), "no tokenizer can be built from it"),
        (tekken() | {"vocab": [{"rank": 0, "token_bytes": "*"}]}, "not readable as a tekken tokenizer"),
    ],
)
def test_a_damaged_tekken_file_is_refused_in_one_line(content: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=reason) as caught:
        load(tmp_path, {"tekken.json": content})

    assert str(caught.value).startswith(str(tmp_path / "model" / "tekken.json") + ": ")


def gpt2_files(**config: Any) -> dict[str, Any]:
    texts = [to_byte_level(token) for token in TOKENS]
    merges = ["h e", "l l", "Ġ w", "o r", "he ll", "l d", "Ġw or", "Ã ©", "1 2", "12 3"]
    return {
        "config.json": {"model_type": "gpt2"},
        "vocab.json": {token: i for i, token in enumerate([*texts, "<|endoftext|>"])},
        "merges.txt": "#version: 0.2\n" + "\n".join(merges) + "\n",
        "added_tokens.json": {"<tool>": len(TOKENS) + 1, "<call>": len(TOKENS) + 2},
        "special_tokens_map.json": {"eos_token": "<|endoftext|>", "additional_special_tokens": ["<call>"]},
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"} | config,
    }


TEXTS = ["hello world", " hello", "12345", "he12<tool>he<call>", "é e\u0301 😀", "a<|endoftext|>b", "x  y\n\nz", ""]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_prefix_space": True},
        {"add_bos_token": True, "bos_token": "<|endoftext|>"},
        {"tokenizer_class": "Qwen2Tokenizer"},
    ],
)
def test_vocab_and_merges_give_the_ids_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", gpt2_files(**config))
    reference = AutoTokenizer.from_pretrained(folder)

    backend, special, _ = tokenizer_from_folder(folder)

    assert special.eos == "<|endoftext|>"
    for text in TEXTS:
        assert backend.encode(text).ids == reference.encode(text), text
        assert backend.decode(reference.encode(text), skip_special_tokens=False) == reference.decode(
            reference.encode(text)
        )


@pytest.mark.parametrize(
    ("changes", "file", "reason"),
    [
        ({"merges.txt": None}, "merges.txt", "no such file; vocab.json needs it"),
        ({"merges.txt": "#version: 0.2\nh e\nq\n"}, "merges.txt", "line 3 merges 'q'"),
        ({"merges.txt": "h zz\n"}, "merges.txt", "line 1 merges 'h zz'"),
        ({"vocab.json": {"a": "b"}}, "vocab.json", "the id of 'a' is not a number"),
        ({"vocab.json": {"a": 0, "b": 0}}, "vocab.json", "two tokens have the same id"),
        ({"vocab.json": "{"}, "vocab.json", "not readable as JSON"),
        ({"added_tokens.json": {"<tool>": "x"}}, "added_tokens.json", "the id of '<tool>' is 'x'"),
    ],
)
def test_damaged_vocab_and_merges_are_refused_in_one_line(
    changes: dict[str, Any], file: str, reason: str, tmp_path: Path
) -> None:
    files = {name: content for name, content in (gpt2_files() | changes).items() if content is not None}

    with pytest.raises(ModelFilesError, match=reason) as caught:
        load(tmp_path, files)

    assert str(caught.value).startswith(str(tmp_path / "model" / file) + ": ")


def test_a_folder_without_any_vocabulary_names_the_files_that_are_read(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"no tokenizer.json and none of tekken.json, tokenizer.model, tiktoken"):
        load(tmp_path, {"tokenizer_config.json": {}})
