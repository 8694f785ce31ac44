"""Damaged vocabularies and any settings are read, or refused in one line with ModelFilesError."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from hypothesis import given, strategies as st

from lightserve.errors import ModelFilesError
from lightserve.model_files import load_tokenizer
from lightserve.model_files.source import FolderSource
from lightserve.model_files.tokenizer.files.sentencepiece_file import Algorithm
from test.fuzz.profile import FUZZ
from test.fuzz.test_model_files import damaged, scratch, values
from test.model_files.test_byte_vocabulary_files import TIKTOKEN, gpt2_files, tekken
from test.model_files.test_sentencepiece_files import BPE
from test.model_files.vocabulary_files import sentencepiece_model, write_folder

WHOLE = {
    "tokenizer.model": sentencepiece_model(BPE),
    "qwen.tiktoken": TIKTOKEN,
    "tekken.json": json.dumps(tekken()).encode(),
    "vocab.json": json.dumps(gpt2_files()["vocab.json"]).encode(),
    "merges.txt": gpt2_files()["merges.txt"].encode(),
}
UNIGRAM = sentencepiece_model(BPE, Algorithm.UNIGRAM)
FIELDS = ("eos_token", "bos_token", "added_tokens_decoder", "additional_special_tokens", "auto_map", "tokenizer_class")
SWITCHES = ("legacy", "add_prefix_space", "add_bos_token", "add_eos_token")


def load_and_use(files: dict[str, Any]) -> None:
    folder = scratch() / "vocabulary"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        tokenizer = load_tokenizer(FolderSource("any", write_folder(folder, files)))
        FolderSource("any", Path(folder)).eos_token_ids()
    except ModelFilesError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    ids = tokenizer.encode("Hello é 日本  <end>a</s>b")
    stream = tokenizer.decoder.stream(True)
    assert "".join([*map(stream.push, ids), stream.flush()]) == tokenizer.decode(ids)


@FUZZ
@given(data=st.data(), name=st.sampled_from(sorted(WHOLE)))
def test_a_damaged_vocabulary_is_read_or_refused(data: st.DataObject, name: str) -> None:
    whole = data.draw(st.sampled_from([WHOLE[name], UNIGRAM])) if name == "tokenizer.model" else WHOLE[name]
    others = {"vocab.json", "merges.txt"} if name in ("vocab.json", "merges.txt") else set()

    load_and_use({other: WHOLE[other] for other in others} | {name: data.draw(damaged(whole, len(whole)))})


@FUZZ
@given(
    name=st.sampled_from(["tokenizer.model", "qwen.tiktoken", "tekken.json"]),
    fields=st.dictionaries(
        st.sampled_from(FIELDS),
        values | st.dictionaries(st.sampled_from(["1", "50", "300", "x"]), values | st.just({"content": "<end>"})),
        max_size=3,
    ),
    switches=st.dictionaries(st.sampled_from(SWITCHES), st.booleans() | values),
    added=values,
)
def test_any_settings_are_used_or_refused(
    name: str, fields: dict[str, Any], switches: dict[str, Any], added: Any
) -> None:
    config = json.dumps(fields | switches)

    load_and_use({name: WHOLE[name], "tokenizer_config.json": config, "added_tokens.json": json.dumps(added)})
