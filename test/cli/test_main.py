"""The ``lightserve`` command: its subcommands, and what a mistake in one gets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightserve import __version__
from lightserve.cli import bench
from lightserve.cli.main import COMMANDS, main
from lightserve.models.registry import supported_models
from test.cli.terminal import ROOT

TORCH_OR_SERVER = "[m for m in ('torch', 'numpy', 'msgspec', 'fastapi', 'tokenizers', 'yaml') if m in sys.modules]"


class FakeMain:
    """The main function of a command. It records its calls and returns an exit code."""

    def __init__(self, code: int) -> None:
        self.calls: list[tuple[list[str], dict[str, Any]]] = []
        self._code = code

    def __call__(self, argv: list[str], **options: Any) -> int:
        self.calls.append((argv, options))
        return self._code


def test_help_lists_the_commands_without_importing_them(capsys: pytest.CaptureFixture[str]) -> None:
    code = f"import sys; from lightserve.cli.main import main; main(['--help']); print({TORCH_OR_SERVER})"

    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    *text, imported = run.stdout.splitlines()
    assert imported == "[]"
    assert [line.split()[0] for line in text if line.startswith("  ")] == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([name, "--help"])
    except SystemExit as exit:  # argparse's
        code = int(exit.code or 0)

    assert code == 0
    assert f"usage: lightserve {name}" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lightserve {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["srve"], "unknown command 'srve'; did you mean serve?"),
        (["xyzzy"], "unknown command 'xyzzy'; known: serve, engine, chat,"),
        (["serve", "--prot", "1"], "unknown argument --prot; did you mean --port?"),
        (["serve", "--port"], "--port: expected one argument"),
        (["--port", "8000"], "--port is a flag of the server: lightserve serve --port"),
        (["bench", "serv"], "unknown benchmark 'serv'; did you mean serve?"),
        (["doctor", "--prot"], "unknown argument --prot; did you mean --port?"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_remedy(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(argv)
    except SystemExit as exit:
        code = int(exit.code or 0)

    assert code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lightserve: {message}")


@pytest.mark.parametrize("argv", [["Who are you?"], ["--max_new_tokens", "3"]])
def test_a_prompt_without_a_command_is_answered_as_before(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answer = FakeMain(0)
    monkeypatch.setattr("lightserve.offline.generate.main", answer)

    assert main(argv) == 0
    assert answer.calls == [(argv, {})]


def test_serve_starts_the_server_with_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = FakeMain(3)
    monkeypatch.setattr("lightserve.server.api_server.main", serve)

    assert main(["serve", "some/model", "--port", "1"]) == 3
    assert serve.calls == [(["some/model", "--port", "1"], {"prog": "lightserve serve"})]


# bench


@pytest.mark.parametrize("name", bench.BENCHMARKS)
def test_a_benchmark_gets_the_rest_of_the_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, fake = FakeMain(0), ModuleType("fake_benchmark")
    fake.main = measure  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "argv", ["lightserve"])
    monkeypatch.setitem(sys.modules, bench.BENCHMARKS[name].module, fake)

    assert main(["bench", name, "--seed", "1"]) == 0
    assert measure.calls == [(["--seed", "1"], {})]
    assert sys.argv[0] == f"lightserve bench {name}"


def test_a_package_that_a_benchmark_needs_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightserve"])
    monkeypatch.setitem(bench.BENCHMARKS, "plots", bench.Benchmark("", "no_such_package"))

    assert main(["bench", "plots"]) == 2
    assert "bench plots needs the package no_such_package, which is missing" in capsys.readouterr().err


# models


def hub_model(cache: Path, name: str, config: dict[str, str] | None = None, files: tuple[str, ...] = ()) -> Path:
    """A repository as huggingface_hub stores it: blobs, and snapshots of links to them."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc"
    (folder / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    contents = dict.fromkeys(files, "x" * 1000) | ({"config.json": json.dumps(config)} if config else {})
    for path, content in contents.items():
        (folder / "blobs" / path).write_text(content)
        (snapshot / path).symlink_to(folder / "blobs" / path)
    return folder


def test_models_lists_the_registry_and_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    hub_model(tmp_path, "org/good", {"model_type": "llama"}, ("model.safetensors",))
    hub_model(tmp_path, "org/strange", {"model_type": "clip"})
    hub_model(tmp_path, "org/files", None, ("a.gguf",))
    (hub_model(tmp_path, "org/half", {"model_type": "llama"}) / "blobs" / "x.incomplete").touch()

    assert main(["models"]) == 0
    text = capsys.readouterr().out
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)

    assert set(supported_models()) <= set(text.split())
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ")}
    assert lines["org/good"].split()[1:] == ["1.0", "kB", "llama"]
    assert lines["org/strange"].endswith("clip is not supported")
    assert lines["org/half"].endswith("download incomplete")
    assert lines["org/files"].endswith("GGUF: a.gguf")
    problems = {model["name"]: model["problem"] for model in listed["cached"]}
    assert problems == {
        "org/files": None,
        "org/good": None,
        "org/half": "download incomplete",
        "org/strange": "clip is not supported",
    }
    assert listed["model_types"] == sorted(supported_models())


def test_a_cache_that_does_not_exist_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "absent"))

    assert main(["models"]) == 0
    assert "\n  nothing\n" in capsys.readouterr().out


def test_a_reader_that_closes_the_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m lightserve.cli.main models --json | true; echo ${{PIPESTATUS[0]}}"

    run = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)

    assert (run.stdout.strip(), run.stderr) == ("0", "")
