"""A tokenizer that cannot be read stops the start with one line that names the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightserve.server import api_server
from test.model_files.test_byte_vocabulary_files import TIKTOKEN
from test.model_files.test_remote_code import CODE, CONFIG
from test.model_files.test_sentencepiece_files import WHOLE
from test.model_files.vocabulary_files import write_folder
from test.server.launcher_process import TINY


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (
            {"tokenizer.model": WHOLE[:1000]},
            "tokenizer.model: not readable as a SentencePiece model (it ends",
        ),
        ({"qwen.tiktoken": TIKTOKEN.replace(b"aGU=", b"a?U=")}, "qwen.tiktoken: not readable as a file of tiktoken"),
        (
            {"qwen.tiktoken": TIKTOKEN.replace(b"aGU= 256\n", b"")},
            "qwen.tiktoken: not readable as a file of tiktoken",
        ),
        ({"tekken.json": "[1, 2"}, "tekken.json: not readable as JSON"),
        ({"vocab.json": {"a": 0}}, "merges.txt: no such file; vocab.json needs it"),
        (
            {"tokenizer_config.json": CONFIG, "tokenization_words.py": CODE},
            "--trust_remote_code and run: pip install 'transformers",
        ),
        ({"tokenizer_config.json": {}}, "no tokenizer.json and none of tekken.json"),
    ],
)
def test_the_server_refuses_a_tokenizer_in_one_line(
    files: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "model", {"config.json": TINY | {"model_type": "llama"}} | files)

    code = api_server.main(["--port=0", f"--model_dir={folder}", "--load_format=dummy"])

    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert str(folder) in line
    assert named in line
    assert "Traceback" not in line
