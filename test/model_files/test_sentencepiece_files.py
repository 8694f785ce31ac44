"""``tokenizer.model`` of SentencePiece, with vocabularies small enough to follow by hand.

The expected pieces of this file were also obtained from the package sentencepiece, with the same bytes as its model.
"""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from lightserve.errors import ModelFilesError
from lightserve.model_files.tokenizer.eos_tokens import eos_tokens_of_folder
from lightserve.model_files.tokenizer.files.sentencepiece_file import Algorithm, Piece
from lightserve.model_files.tokenizer.folder_tokenizer import tokenizer_from_folder
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from test.model_files.vocabulary_files import (
    BYTES,
    CONTROL,
    SPECIAL,
    UNUSED,
    USER,
    message,
    scored,
    sentencepiece_model,
    write_folder,
)

LETTERS = scored("▁", "a", "b", "c", "d", start=-50.0)
# of sentencepiece, for the rules \u2460 -> 1, \ufb01 -> fi and \uff21 -> a; compressed
CHARSMAP = (
    "eNod02WQlgUQAOB3PmGGEQYQhg6lQboRpJEOpUG6jwYFpI+U7g7h6DhKuhulFFBCQNRTWvrofD525pndmf2xP3Y3iBMEwbgPgpjK"
    "oWDy8FCwMF0QjsjoeKFgSNwg0I4MEaWOr/Eh96aFggRyIhLyEYlJShKSsSs2FKSQk5OKlKQhNeERafmY9GTgEzKRkSxkJhtZyUF2"
    "cvIpuclFXvKQn3wUpACFKURRivAZxShBcUryOaUpRVnKUJ5yfEEFKlGRKlSmGlWpQXVqUZOv+JI61KYedWlAfRrRkK9pTFOa0Jxm"
    "tKQFrWlFW9rQnnZE0IFOdKQLnelGV3rQnW/oSS++pQ+96ct39KcfAxnAYAYxJLxwhjGUEQzne0YymlGMZQzjwyfDRCYwmUlMZQrT"
    "mcZMZjCbWcxlDvOZxwJ+IIqFLGYRS1nCcpaxkhWsZhVriGYda9nAejbyI5vZxFa2sJ1t7GQHu8P3yV72sJ99HOQAhznETxzhKD9z"
    "nGOc5AS/8gunOcVvnOEsv3Oec/zBBS5xkT+5zF9c4R/+5l9iuMp/XOcaN7nBbW5xh//Df8hdHnCfRzzkMbE85QnPecZLXvCaV7zl"
    "zfv/aRm0iwjeAdLKisY="
)
BPE = [*SPECIAL, *BYTES, *scored("ab", "bc", "▁a", "cd", "▁▁"), *LETTERS]


def load(tmp_path: Path, model: bytes, **config: Any) -> Backend:
    folder = write_folder(tmp_path / "model", {"tokenizer.model": model, "tokenizer_config.json": config})
    return tokenizer_from_folder(folder)[0]


def pieces_of(backend: Backend, text: str) -> list[str]:
    return list(backend.encode(text, add_special_tokens=False).tokens)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abcd", ["▁", "ab", "cd"]),  # not "bc", whose score is lower than that of "ab"
        ("bcd", ["▁", "bc", "d"]),
        (" a", ["▁", "▁a"]),
        ("a é", ["▁a", "▁", "<0xC3>", "<0xA9>"]),
        ("<0x41>", ["▁", "<0x3C>", "<0x30>", "<0x78>", "<0x34>", "<0x31>", "<0x3E>"]),  # text, not the byte A
        ("▁b", ["▁▁", "b"]),
        ("", []),
    ],
)
def test_pieces_merge_by_score_and_other_characters_become_bytes(text: str, pieces: list[str], tmp_path: Path) -> None:
    assert pieces_of(load(tmp_path, sentencepiece_model(BPE)), text) == pieces


def test_without_byte_fallback_a_run_of_other_characters_is_one_unknown_token(tmp_path: Path) -> None:
    model = sentencepiece_model([*SPECIAL, *scored("ab"), *LETTERS], trainer={35: False})

    assert pieces_of(load(tmp_path, model), "ab日本a") == ["▁", "ab", "<unk>", "a"]


@pytest.mark.parametrize(
    ("config", "pieces"),
    [
        ({}, ["▁a", "</s>", "▁", "b", "▁", "c"]),
        ({"legacy": True}, ["▁a", "</s>", "▁", "b", "▁", "c"]),
        ({"legacy": False}, ["▁a", "</s>", "b", "▁", "c"]),
        ({"add_prefix_space": False}, ["a", "</s>", "b", "▁", "c"]),
    ],
)
def test_the_config_decides_where_a_space_is_added(config: dict[str, bool], pieces: list[str], tmp_path: Path) -> None:
    assert pieces_of(load(tmp_path, sentencepiece_model(BPE), **config), "a</s>b c") == pieces


@pytest.mark.parametrize("legacy", [True, False])
def test_a_text_that_begins_with_spaces_gets_one_more(legacy: bool, tmp_path: Path) -> None:
    backend = load(tmp_path, sentencepiece_model(BPE), legacy=legacy)

    assert pieces_of(backend, "  b") == ["▁▁", "▁", "b"]
    assert backend.decode(backend.encode("  b").ids) == "  b"


@pytest.mark.parametrize("legacy", [True, False])
def test_a_model_may_remove_extra_spaces(legacy: bool, tmp_path: Path) -> None:
    backend = load(tmp_path, sentencepiece_model(BPE, normalizer={4: True}), legacy=legacy)

    assert pieces_of(backend, "  b   c  ") == ["▁", "b", "▁", "c"]
    assert pieces_of(backend, "   ") == []


def test_an_added_token_of_spaces_survives_a_model_that_removes_them(tmp_path: Path) -> None:
    added = {str(len(BPE)): {"content": "  ", "normalized": True}}
    backend = load(tmp_path, sentencepiece_model(BPE, normalizer={4: True}), added_tokens_decoder=added)

    assert pieces_of(backend, "b  c") == ["▁", "b", "  ", "▁", "c"]


def test_a_model_may_add_no_space(tmp_path: Path) -> None:
    backend = load(tmp_path, sentencepiece_model(BPE, normalizer={3: False}))

    assert pieces_of(backend, "b a") == ["b", "▁a"]
    assert backend.decode(backend.encode(" b").ids) == " b"


@pytest.mark.parametrize("normalizer", [{}, {3: False}, {4: True}])
def test_user_defined_pieces_are_never_split_or_merged(normalizer: dict[int, bool], tmp_path: Path) -> None:
    user = [Piece("<end>", type=USER), Piece("▁▁▁", type=USER), Piece("bcd", type=USER)]
    backend = load(tmp_path, sentencepiece_model([*BPE, *user], normalizer={3: True, 4: False} | normalizer))

    assert pieces_of(backend, "a<end>ab")[-2:] == ["<end>", "ab"]  # no space is added after it
    assert pieces_of(backend, "abcd")[-1] == "bcd"
    assert pieces_of(backend, "d   d")[-2:] == (["▁", "d"] if normalizer.get(4) else ["▁▁▁", "d"])


def test_a_config_that_lists_user_defined_pieces_changes_nothing(tmp_path: Path) -> None:
    """Gemma's does, with ``normalized: false``, which would only find them written with ``▁``."""
    model = sentencepiece_model([*BPE, Piece("▁▁▁", type=USER)], normalizer={3: False})
    added = {str(len(BPE)): {"content": "▁▁▁", "normalized": False, "special": False}}

    assert pieces_of(load(tmp_path, model, added_tokens_decoder=added), "b   c") == ["b", "▁▁▁", "c"]


def test_control_pieces_are_special_and_surround_texts_as_configured(tmp_path: Path) -> None:
    config = {"add_bos_token": True, "add_eos_token": True}
    backend = load(tmp_path, sentencepiece_model([*BPE, Piece("<ctl>", type=CONTROL)]), **config)

    assert backend.encode("a<ctl>").tokens == ["<s>", "▁a", "<ctl>", "</s>"]
    assert backend.decode(backend.encode("a<ctl>").ids) == "a"
    assert load(tmp_path, sentencepiece_model(BPE)).encode("a").tokens == ["<s>", "▁a"]
    assert load(tmp_path, sentencepiece_model(BPE), add_bos_token=False).encode("a").tokens == ["▁a"]


def test_added_tokens_follow_the_pieces_or_replace_unused_ones(tmp_path: Path) -> None:
    model = sentencepiece_model([*BPE, Piece("[UNUSED_0]", type=USER)])
    added = {
        str(len(BPE)): {"content": "<|im_start|>", "special": True},
        str(len(BPE) + 3): {"content": "<|im_end|>", "special": True},
    }
    backend = load(tmp_path, model, added_tokens_decoder=added)

    assert pieces_of(backend, "<|im_start|>a<|im_end|>") == ["<|im_start|>", "▁a", "<|im_end|>"]
    assert backend.token_to_id("<|im_start|>") == len(BPE)
    assert backend.token_to_id("<|im_end|>") == len(BPE) + 3
    assert pieces_of(backend, "[UNUSED_0]")[1] == "<0x5B>"


def test_characters_are_replaced_by_the_rules_of_the_model(tmp_path: Path) -> None:
    charsmap = zlib.decompress(base64.b64decode(CHARSMAP))
    backend = load(tmp_path, sentencepiece_model([*BPE, *scored("fi", "f", "i", "1")], normalizer={2: charsmap}))

    assert pieces_of(backend, "b\u2460\ufb01\uff21b") == ["▁", "b", "1", "fi", "ab"]


def test_a_unigram_model_takes_the_best_segmentation(tmp_path: Path) -> None:
    pieces = [*SPECIAL, *BYTES, Piece("▁", -3.0), *(Piece(char, -4.0) for char in "<0x41>")]
    pieces += [Piece("a", -2.0), Piece("b", -2.5), Piece("ab", -3.0), Piece("▁ab", -9.0), Piece("ba", -1.0)]
    backend = load(tmp_path, sentencepiece_model(pieces, Algorithm.UNIGRAM))

    assert pieces_of(backend, "ab") == ["▁", "ab"]
    assert pieces_of(backend, "aba") == ["▁", "a", "ba"]
    assert pieces_of(backend, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert pieces_of(backend, "<0x41>") == ["▁", *"<0x41>"]
    assert backend.decode(backend.encode("aba é").ids) == "aba é"


def test_streams_decode_bytes_spaces_and_special_tokens(tmp_path: Path) -> None:
    backend = load(tmp_path, sentencepiece_model(BPE))
    tokenizer = Tokenizer(backend, SpecialTokens(), None)
    stream = tokenizer.decoder.stream(True)

    given = [stream.push(token_id) for token_id in backend.encode("a é b</s>").ids] + [stream.flush()]

    assert "".join(given) == "a é b"
    assert "\ufffd" not in "".join(given)


def test_a_chatglm_folder_has_its_tokens_after_the_pieces(tmp_path: Path) -> None:
    backend = load(
        tmp_path, sentencepiece_model(BPE), tokenizer_class="ChatGLMTokenizer", auto_map={"AutoTokenizer": []}
    )

    assert backend.encode("a").tokens == ["[gMASK]", "sop", "▁a"]
    assert backend.token_to_id("[MASK]") == len(BPE)
    assert backend.encode("<|user|>", add_special_tokens=False).ids == [len(BPE) + 6]
    assert pieces_of(backend, "[gMASK]sop<|user|>") == ["[gMASK]", "sop", "<|user|>"]
    assert "sop" not in pieces_of(backend, "philosophy")


def test_the_end_token_is_that_of_the_model_unless_a_config_names_another(tmp_path: Path) -> None:
    files: dict[str, Any] = {"tokenizer.model": sentencepiece_model(BPE), "config.json": {}}
    assert eos_tokens_of_folder(write_folder(tmp_path / "model", files)) == (2,)

    files["tokenizer_config.json"] = {"eos_token": "cd"}
    assert eos_tokens_of_folder(write_folder(tmp_path / "model", files)) == (BPE.index(Piece("cd", -3.0)),)


WHOLE = sentencepiece_model(BPE)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (WHOLE[: len(WHOLE) // 2], "it ends at byte"),
        (WHOLE[:1], "it ends at byte 1"),
        (b"", "it has no pieces"),
        (b"\n\x03\x0a\x01\xff", "codec can't decode"),
        (b"\x0f", "unknown wire type 7"),
        (b"version https://git-lfs.github.com/spec/v1\n", "SentencePiece model"),
        (sentencepiece_model([*BPE, Piece("ab")]), "1 pieces occur twice"),
        (sentencepiece_model(BPE[1:]), "no unknown piece"),
        (sentencepiece_model(BPE, trainer={3: 4}), r"model_type 4; supported: 1 \(unigram\) and 2 \(bpe\)"),
        (sentencepiece_model(BPE, trainer={24: True}), "treat_whitespace_as_suffix is not supported"),
        (sentencepiece_model(BPE, normalizer={2: b"x"}), "no tokenizer can be built from it"),
        (sentencepiece_model(BPE, normalizer={5: False}), "escape_whitespaces = false is not supported"),
        (WHOLE + message({5: message({2: b"abc"})}), "a denormalizer is not supported"),
        (sentencepiece_model([*BPE, Piece("x", float("nan"))]), "the score nan"),
        (sentencepiece_model([*BPE, Piece("abcd", type=UNUSED)]), "unused pieces that are made of others"),
    ],
)
def test_a_damaged_or_unknown_model_is_refused_in_one_line(model: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=reason) as caught:
        load(tmp_path, model)

    assert str(caught.value).startswith(str(tmp_path / "model" / "tokenizer.model") + ": ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"legacy": "yes"}, "legacy is 'yes', not true or false"),
        ({"add_bos_token": True, "bos_token": "<begin>"}, "every text has the token '<begin>'"),
        ({"added_tokens_decoder": {"x": {}}}, "which is not an id with a content"),
        (
            {"added_tokens_decoder": {"999": {"content": "ab"}}},
            "added token 'ab' has id 999, but tokenizer.model gives",
        ),
        ({"added_tokens_decoder": {"99999999": {"content": "<z>"}}}, "added token id 99999999 is too large"),
        ({"tokenizer_class": "XLMRobertaTokenizer"}, "tokenizer_class 'XLMRobertaTokenizer' is not supported with"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=reason) as caught:
        load(tmp_path, WHOLE, **config)

    assert str(caught.value).startswith(str(tmp_path / "model" / "tokenizer_config.json") + ": ")
