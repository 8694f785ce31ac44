"""The command line, as its user meets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def lightserve(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightserve.offline.generate", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_prompt_gets_a_response_and_its_speed_on_stderr() -> None:
    run = lightserve("What is the capital of France?", "--max-new-tokens", "20", "--quantization", "none")

    assert run.returncode == 0, run.stderr
    assert run.stdout == "> What is the capital of France?\nThe capital of France is Paris.\n"
    assert "weights: 100 %" in run.stderr
    assert "tokens/s; loaded in" in run.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model_dri", "x"], "unknown argument --model_dri; did you mean --model_dir?"),
        (["--model_dir", "/no/such"], "lightserve: /no/such: no such folder or .gguf file"),
        (["--model", __file__], "not a GGUF file"),
        (["--temperature", "-1"], "lightserve: temperature: Expected `float` >= 0.0, found -1.0"),
        (["--data_type", "int3"], "invalid choice: 'int3'"),
        (["--max-model-len", "99999"], "the model supports 8192 tokens"),
        (["--running_max_req_size", "0"], "must be at least 1"),
    ],
)
def test_a_configuration_error_is_one_line_and_exit_code_2(args: list[str], message: str) -> None:
    run = lightserve(*args)

    assert run.returncode == 2
    assert message in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr


def test_help_names_every_flag_with_its_default() -> None:
    run = lightserve("--help")

    for flag in ("--model_dir", "--model", "--max_total_token_num", "--gpu-memory-utilization"):
        assert flag in run.stdout
    assert "(default: 0.9)" in run.stdout  # of --mem_fraction
