"""What the operator gets wrong is one line with the remedy, before any process starts."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from lightserve.server import api_server
from test.server.launched import launched, tiny_model


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What the launcher says, in one line, as it refuses to start."""
    try:
        code = api_server.main([*flags])
    except SystemExit as error:  # argparse's way
        code = int(error.code or 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    return line


def test_a_port_in_use_is_named_with_its_holder_before_a_process_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with launched(tmp_path, f"--port={port}") as server:
            assert server.exit_code() == 2

            (line,) = server.said().splitlines()
            assert line.startswith(f"lightserve: port {port} is in use by process {os.getpid()}, child of ")
            assert server.has_cleaned_up()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model_dri", "x"], "unknown argument --model_dri; did you mean --model_dir?"),
        (["--httpserver-worker=2"], "did you mean --httpserver-workers?"),
        (["--port", "many"], "argument --port: invalid int value: 'many'"),
        (["--port", "70000"], "port=70000: must be in 0..65535"),
        (["--tp", "0"], "tp=0: must be at least 1"),
        (["--model_dir", "/no/such"], "/no/such: no such folder or .gguf file"),
        (["--host", "203.0.113.1"], "is not an address of this machine"),
    ],
)
def test_a_wrong_flag_is_told(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    line = refusal(capsys, "--port=0", *flags)

    assert line.startswith("lightserve: ")
    assert message in line


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"model_type": "gpt2"}, [], "model_type 'gpt2' is not supported; supported: bloom, llama, qwen2, qwen3"),
        ({"model_type": None}, [], "model_type"),
        ({}, ["--tp=3"], "4 attention heads do not divide among tp=3 ranks"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 36},
            ["--tp=3"],
            "KV",
        ),
        ({}, ["--max_model_len=513"], "max_req_total_len=513, but the model reaches 512 tokens; lower it"),
    ],
)
def test_a_model_that_cannot_be_served_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, object], flags: list[str], message: str
) -> None:
    model = tiny_model(tmp_path, **changes)

    line = refusal(capsys, "--port=0", "--load_format=dummy", f"--model_dir={model}", *flags)

    assert message in line


def test_weights_that_are_missing_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refusal(capsys, "--port=0", f"--model_dir={tiny_model(tmp_path)}")

    assert "no weights (model*.safetensors or pytorch_model*.bin)" in line
