"""``lightserve run-batch``: with its own server, with a running one, interrupted and continued, with wrong files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightserve.cli.main import main
from test.api.scripted import write_model
from test.api.server import RESPONSE_S, ServerProcess, running_server
from test.waiting import wait_until

NULL = ("--null_worker", "--null_step_ms", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("server") / "log", *NULL, "--model_dir", model) as server:
        yield server


def request(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True} | fields
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(folder: Path, requests: list[dict[str, Any]]) -> tuple[str, str]:
    source = folder / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, requests)))
    return str(source), str(folder / "out.jsonl")


def results(path: str) -> dict[str, int]:
    """Status by custom_id."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    statuses = {line["custom_id"]: line["response"]["status_code"] for line in lines}
    assert len(statuses) == len(lines)
    return statuses


@pytest.mark.slow
def test_a_file_is_run_with_a_server_of_its_own(model: str, tmp_path: Path) -> None:
    source, output = write(tmp_path, [request("a"), request("b")])

    command = [sys.executable, "-m", "lightserve.cli.main", "run-batch", "-i", source, "-o", output, model, *NULL]
    run = subprocess.run(command, capture_output=True, text=True, timeout=RESPONSE_S, check=False)

    assert run.returncode == 0, run.stderr
    assert results(output) == {"a": 200, "b": 200}
    assert "requests: 100 % of 2" in run.stderr
    assert "2 completed, 0 failed" in run.stderr


@pytest.mark.slow
def test_a_request_that_is_refused_is_in_the_output(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write(tmp_path, [request(f"{i}", temperature=-(i % 2)) for i in range(10)])

    assert main(["run-batch", "--input-file", source, "--output-file", output, "--url", server.url]) == 1

    assert results(output) == {f"{i}": 400 if i % 2 else 200 for i in range(10)}
    assert "5 completed, 5 failed" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_where_it_stopped(server: ServerProcess, tmp_path: Path) -> None:
    source, output = write(tmp_path, [request(f"{i}", max_tokens=100) for i in range(40)])
    arguments = ["run-batch", "-i", source, "-o", output, "--url", server.url, "--concurrency", "2"]
    partial = Path(f"{output}.partial")

    run = subprocess.Popen([sys.executable, "-m", "lightserve.cli.main", *arguments])
    wait_until(lambda: partial.exists() and partial.read_bytes().count(b"\n") >= 5)
    run.kill()
    run.wait()
    finished = partial.read_bytes().splitlines()[:5]
    with partial.open("ab") as file:
        file.write(b'{"custom_id": "cut o')
    assert not Path(output).exists()

    assert main(arguments) == 0
    assert results(output) == {f"{i}": 200 for i in range(40)}
    assert Path(output).read_bytes().splitlines()[:5] == finished
    assert not partial.exists()


def test_wrong_lines_are_named_before_a_request_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write(tmp_path, [request("a"), request("a"), request("b") | {"url": "/v1/nothing"}])

    assert main(["run-batch", "-i", source, "-o", output, "--url", "http://127.0.0.1:1"]) == 2

    error = capsys.readouterr().err
    assert "line 2: custom_id 'a' is used by line 1 already" in error
    assert "line 3: url is '/v1/nothing'" in error
    assert not Path(output).exists()


def test_url_and_flags_of_a_server_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write(tmp_path, [request("a")])

    assert main(["run-batch", "-i", source, "-o", output, "--url", "http://127.0.0.1:1", "--tp", "2"]) == 2
    assert "--tp: --url has a model already" in capsys.readouterr().err
    assert main(["run-batch", "-i", str(tmp_path / "none"), "-o", output]) != 0
    assert "No such file" in capsys.readouterr().err
