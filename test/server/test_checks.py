"""A configuration error is one line with the remedy, before any process starts."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from lightserve.config.parse import parse_server
from lightserve.server import api_server
from lightserve.server.checks import check
from lightserve.server.keys import with_keys
from test.server.launcher_process import TINY, start_launcher, tiny_model

TLS = Path(__file__).parent.parent / "api" / "tls"
CERTIFICATE = ["--ssl_certfile", f"{TLS}/server.pem", "--ssl_keyfile", f"{TLS}/server.key"]


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line that the launcher prints when it refuses to start."""
    try:
        code = api_server.main([*flags])
    except SystemExit as error:  # raised by argparse
        code = int(error.code or 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    return line


def test_a_port_in_use_is_named_with_its_holder_before_a_process_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with start_launcher(tmp_path, f"--port={port}") as server:
            assert server.exit_code() == 2

            (line,) = server.stderr().splitlines()
            assert line.startswith(f"lightserve: port {port} is in use by process {os.getpid()}, child of ")
            assert server.has_cleaned_up()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model_dri", "x"], "unknown argument --model_dri; did you mean --model_dir?"),
        (["--httpserver-worker=2"], "did you mean --httpserver-workers?"),
        (["--port", "many"], "lightserve: --port: invalid int value: 'many'"),
        (["--port", "70000"], "port=70000: must be between 0 and 65535"),
        (["--tp", "0"], "tp=0: must be at least 1"),
        (["--pp", "0"], "pp=0: must be at least 1"),
        (["--ep", "2"], "ep=2: the tensor-parallel ranks divide the experts; set --tp 2 too"),
        (
            ["--tp", "3", "--ep", "3"],
            "--ep 3 cannot be used with a llama model: it has no experts; use --tp alone",
        ),
        (["--enable_dp_attention"], "enable_dp_attention: there is one rank; set --tp and --ep"),
        (
            ["--tp", "2", "--enable_dp_attention"],
            "all ranks share the experts of the model; set --ep 2 too",
        ),
        (["--tp", "4", "--ep", "4", "--attention_dp", "3"], "attention_dp=3: it does not divide the 4 ranks of --tp"),
        (["--pp", "31"], "pp=31: the model has 30 layers, and each stage needs one"),
        (["--model_dir", "/no/such"], "/no/such: no such folder or .gguf file"),
        (["--host", "203.0.113.1"], "is not an address of this machine"),
        (["--api_key_file", "/no/such"], "--api_key_file: cannot read /no/such"),
        (["--api_key_file", "/dev/null"], "--api_key_file: /dev/null contains no key; write one key per line"),
        (["--admin_key_file", "/dev"], "--admin_key_file: cannot read /dev"),
        (["--ssl_keyfile", f"{TLS}/server.key"], "--ssl_keyfile and --ssl_ca_certs need --ssl_certfile"),
        (["--ssl_certfile", "/no/such"], "cannot use /no/such for HTTPS (No such file or directory)"),
        (["--ssl_certfile", f"{TLS}/server.pem"], "server.pem for HTTPS"),  # it contains no private key
        (["--ssl_certfile", f"{TLS}/server.pem", "--ssl_keyfile", f"{TLS}/client.key"], "(key values mismatch)"),
        (["--ssl_certfile", f"{TLS}/server.pem", "--ssl_keyfile", f"{TLS}/locked.key"], "without a password"),
        ([*CERTIFICATE, "--ssl_ca_certs", __file__], "test_checks.py ("),
    ],
)
def test_a_wrong_flag_is_reported(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    line = refusal(capsys, "--port=0", *flags)

    assert line.startswith("lightserve: ")
    assert message in line


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"model_type": "mamba"}, [], "model_type 'mamba' is not supported; "),
        ({}, ["--model_type=mamba"], "model_type 'mamba' is not supported; "),
        ({"model_type": None}, [], "model_type"),
        ({}, ["--tp=3"], "4 attention heads do not divide among tp=3 ranks"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 36},
            ["--tp=3"],
            "KV",
        ),
        ({}, ["--quantization=gguf"], "--quantization gguf needs a .gguf file; leave it out"),
        (
            {"quantization_config": {"quant_method": "gguf"}},
            [],
            "quant_method gguf needs a .gguf file; set",
        ),
        ({}, ["--max_model_len=513"], "max_req_total_len=513, but the model supports 512 tokens; lower it"),
    ],
)
def test_a_model_that_cannot_be_served_is_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, object], flags: list[str], message: str
) -> None:
    model = tiny_model(tmp_path, **changes)

    line = refusal(capsys, "--port=0", "--load_format=dummy", f"--model_dir={model}", *flags)

    assert message in line


def test_a_llama_under_another_name_is_recognised_by_its_tensors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    model = tiny_model(tmp_path, model_type="mygpt")
    capsys.readouterr()  # transformers shows its progress

    line = refusal(capsys, "--port=0", f"--model_dir={model}")

    assert "model_type 'mygpt' is not supported" in line
    assert re.search("; its tensors fit llama, .*: try --model_type llama", line)
    assert check(parse_server(["--port=0", f"--model_dir={model}", "--model_type=llama"])).name == model.name


def test_missing_weights_are_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refusal(capsys, "--port=0", f"--model_dir={tiny_model(tmp_path)}")

    assert "no weights (model*.safetensors or pytorch_model*.bin)" in line


@pytest.mark.parametrize(
    ("flags", "is_open"),
    [
        (["--host=0.0.0.0"], True),
        (["--host=0.0.0.0", "--admin_key=boss"], True),
        (["--host=0.0.0.0", "--api_key=k"], False),
        (["--host=0.0.0.0", *CERTIFICATE], True),
        (["--host=0.0.0.0", *CERTIFICATE, f"--ssl_ca_certs={TLS}/authority.pem"], False),
        (["--host=127.0.0.1"], False),
    ],
)
def test_a_server_without_keys_on_a_public_address_logs_a_warning(
    log: pytest.LogCaptureFixture, tmp_path: Path, flags: list[str], is_open: bool
) -> None:
    check(parse_server(["--port=0", "--null_worker", f"--model_dir={tiny_model(tmp_path)}", *flags]))

    assert ("anyone who can reach 0.0.0.0 may use the server" in log.text) is is_open


def test_a_key_file_that_other_users_can_read_logs_a_warning(log: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    for mode, warns in ((0o600, False), (0o640, True)):
        keys.chmod(mode)

        config = with_keys(parse_server([f"--api_key_file={keys}", "--api_key=zero"]))

        assert config.http.api_key == ["zero", "one"]
        assert ("chmod 600" in log.text) is warns


def test_a_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTSERVE_API_KEY", "secret")
    assert with_keys(parse_server(["--api_key", "zero"])).http.api_key == ["zero", "secret"]

    monkeypatch.setenv("LIGHTSERVE_API_KEY", "")
    assert with_keys(parse_server([])).http.api_key == []
