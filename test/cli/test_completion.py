"""Completion scripts, read and used by the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from lightserve.cli.completion.flags import SHELLS, all_commands
from lightserve.cli.completion.scripts import SCRIPTS
from lightserve.cli.main import COMMANDS
from lightserve.config.parse import option_types

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_lightserve
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "lightserve.bash"
    path.write_text(text_for("bash"))
    return path


@cache
def text_for(shell: str) -> str:
    return SCRIPTS[shell](all_commands())


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_can_read_its_script(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is missing: apt-get install {shell}")
    (tmp_path / "script").write_text(text_for(shell))

    run = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True)

    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_knows_every_command_and_every_flag(shell: str) -> None:
    prefix = "-l " if shell == "fish" else "--"

    for name in (*COMMANDS, *(f"{prefix}{option}" for option in option_types())):
        assert name in text_for(shell), name


@pytest.mark.parametrize(
    ("typed", "replies"),
    [
        (["lightserve", "s"], {"serve", "status"}),
        (["lightserve", ""], {*COMMANDS, "--help", "--version"}),
        (["lightserve", "serve", "--por"], {"--port"}),
        (["lightserve", "serve", "--max_re"], {"--max_req_total_len"}),
        (["lightserve", "serve", "--max-mod"], {"--max-model-len"}),  # as vLLM has it
        (["lightserve", "serve", "model", "--data_type", "f"], {"float32", "float16"}),
        (["lightserve", "serve", "--scheduling-policy", ""], {"fifo", "priority", "cache_aware"}),
        (["lightserve", "serve", ""], set()),  # a path, which bash completes itself
        (["lightserve", "serve", "--config", "s"], set()),
        (["lightserve", "bench", "o"], {"offline"}),
        (["lightserve", "bench", "serve", ""], set()),
        (["lightserve", "completion", ""], set(SHELLS)),
        (["lightserve", "chat", "--u"], {"--url"}),
    ],
)
def test_bash_completes(script: Path, typed: list[str], replies: set[str]) -> None:
    run = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE, "bash", str(script), *typed], capture_output=True, text=True, check=True
    )

    assert set(run.stdout.split()) == replies


def test_fish_completes(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is missing: apt-get install fish")
    (tmp_path / "script").write_text(text_for("fish"))
    line = 'source $argv[1]; complete -C "lightserve serve --data_type f"; complete -C "lightserve bench k"'

    run = subprocess.run(
        ["fish", "--no-config", "-c", line, str(tmp_path / "script")], capture_output=True, text=True, check=True
    )

    assert [line.split("\t")[0] for line in run.stdout.splitlines()] == ["float16", "float32", "kernels"]
