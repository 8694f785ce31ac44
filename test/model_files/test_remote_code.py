"""Tokenizer classes that are Python code in the model's folder run only with --trust_remote_code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightserve.errors import InvalidRequestError, ModelFilesError
from lightserve.model_files import load_tokenizer, resolve
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from lightserve.utils.extras import install_command
from test.model_files.vocabulary_files import write_folder

CODE = '''
from transformers import PreTrainedTokenizer


class WordsTokenizer(PreTrainedTokenizer):
    """One token for each character of its file; others are unknown."""

    vocab_files_names = {"vocab_file": "letters.txt"}

    def __init__(self, vocab_file, **kwargs):
        self._letters = open(vocab_file).read()
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self._letters)

    def get_vocab(self):
        return {letter: i for i, letter in enumerate(self._letters)} | self.added_tokens_encoder

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return max(self._letters.find(token), 0)

    def _convert_id_to_token(self, index):
        return self._letters[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)
'''
CONFIG = {
    "tokenizer_class": "WordsTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_words.WordsTokenizer", None]},
    "eos_token": "</s>",
    "added_tokens_decoder": {"5": {"content": "</s>", "special": True}},
}


def make_folder(folder: Path, code: str = CODE, **changes: Any) -> Path:
    files = {
        "config.json": {"model_type": "llama"},
        "letters.txt": "?abc ",
        "tokenization_words.py": code,
        "tokenizer_config.json": CONFIG | changes,
    }
    return write_folder(folder, files)


@pytest.fixture(autouse=True)
def _own_module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers copies the code of folders into this one. Later tests must import its package from elsewhere."""
    folder = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
    yield
    sys.path[:] = [path for path in sys.path if path != folder]
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(resolve(str(folder), needs_weights=False, trusts_code=True))


def test_without_the_flag_the_error_names_flag_and_package(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")

    advice = r"WordsTokenizer is Python code .* --trust_remote_code .* " + re.escape(install_command("hf"))
    with pytest.raises(ModelFilesError, match=advice):
        load_tokenizer(resolve(str(folder), needs_weights=False))


def test_with_the_flag_the_folders_class_encodes_and_decodes(tmp_path: Path) -> None:
    tokenizer = load(make_folder(tmp_path / "model"))

    assert tokenizer.encode("ab ca</s>") == [1, 2, 4, 3, 1, 5]
    assert tokenizer.decode([1, 2, 4, 3, 5, 999]) == "ab c"
    assert tokenizer.decode([1, 5], skip_special_tokens=False) == "a</s>"
    assert (tokenizer.eos_token, tokenizer.eos_id, tokenizer.num_ids) == ("</s>", 5, 6)
    assert tokenizer.token_to_id("x") is None
    stream = tokenizer.decoder.stream(True)
    assert "".join([*map(stream.push, [1, 4, 2, 5]), stream.flush()]) == "a b"


def test_what_python_code_cannot_do_is_an_invalid_request(tmp_path: Path) -> None:
    tokenizer = load(make_folder(tmp_path / "model"))

    with pytest.raises(InvalidRequestError, match="does not tell the offsets"):
        tokenizer.encode_with_offsets("ab")
    with pytest.raises(ValueError, match="Python code"):  # reported as an invalid request by the grammars
        tokenizer.to_json()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import package_that_is_missing", "package_that_is_missing"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("x = ", "SyntaxError"),
    ],
)
def test_code_that_fails_is_reported_in_one_line(code: str, reason: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", code)

    with pytest.raises(ModelFilesError, match=reason) as caught:
        load(folder)

    assert str(caught.value).startswith(str(folder) + ": ")
    assert "\n" not in str(caught.value)


def test_the_process_stays_without_torch(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    code = (
        "import sys\n"
        "from lightserve.model_files import load_tokenizer, resolve\n"
        "print(load_tokenizer(resolve(sys.argv[1], needs_weights=False, trusts_code=True)).encode('abc'))\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'torch'])\n"
    )
    environment = {"HF_HOME": str(tmp_path), "PATH": ""}

    answer = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert answer.stdout == "[1, 2, 3]\n[]\n"
    assert "torch" not in answer.stderr


def test_known_classes_are_read_without_their_code(tmp_path: Path) -> None:
    from test.model_files.vocabulary_files import ALL_BYTES, tiktoken_file

    folder = make_folder(tmp_path / "model", "raise RuntimeError", tokenizer_class="QWenTokenizer")
    (folder / "qwen.tiktoken").write_bytes(tiktoken_file(ALL_BYTES))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": {}}))

    assert load(folder).encode("a<|endoftext|>") == [ord("a"), 256]
