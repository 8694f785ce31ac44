"""Files of pinned prefixes: both forms are read, and every mistake is one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightserve.errors import OptionError
from lightserve.model_files.pinned_prefixes import after_pinned_prefix, encode_pinned_prefixes, read_pinned_prefixes


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"support": "You help.", "7": "You count."}'),
        ("a.json", '[{"task_id": "support", "prompt": "You help."}, {"task_id": 7, "prompt": "You count."}]'),
        ("a.yaml", "support: You help.\n7: You count.\n"),
    ],
)
def test_objects_and_lists_are_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)

    assert read_pinned_prefixes(str(tmp_path / name)) == {"support": "You help.", "7": "You count."}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is neither JSON"),
        ("{}", "has no prompt"),
        ("[]", "has no prompt"),
        ('["a"]', "must be an object"),
        ('[{"task_id": 1}]', "must be an object"),
        ("3", "must be an object"),
        ('{"a": ""}', "'a' must be a text"),
        ('{"a": 3}', "'a' must be a text"),
        ('{"": "b"}', "'' is no name"),
        ('[{"task_id": null, "prompt": "x"}]', "None is no name"),
        ('[{"task_id": 1, "prompt": "x"}, {"task_id": "1", "prompt": "y"}]', "two prompts '1'"),
        ("\udcff", "is neither JSON"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "prompts.json"
    path.write_bytes(text.encode(errors="surrogateescape"))

    with pytest.raises(OptionError, match=reason) as error:
        read_pinned_prefixes(str(path))

    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_file_and_a_missing_tokenizer_are_reported(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        read_pinned_prefixes(str(tmp_path / "none.json"))
    with pytest.raises(OptionError, match="no tokenizer"):
        encode_pinned_prefixes("any.json", None)
    assert encode_pinned_prefixes(None, None) == {}


def test_only_the_first_prompt_begins_the_text() -> None:
    assert after_pinned_prefix([1, 5], [1, 6], bos_id=1) == [1, 5, 6]
    assert after_pinned_prefix([1, 5], [6], bos_id=1) == [1, 5, 6]
    assert after_pinned_prefix([5], [1, 6], bos_id=1) == [5, 1, 6]
    assert after_pinned_prefix([5], [6], bos_id=None) == [5, 6]
