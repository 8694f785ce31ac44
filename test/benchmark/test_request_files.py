"""The list of files that run for a request has each hop of the way through the processes."""

from __future__ import annotations

import os

import pytest

from benchmark.serving.request_files import FOLDER_VARIABLE, files_of_request, report


@pytest.mark.slow
def test_the_files_of_a_chat_are_listed_by_process() -> None:
    files = files_of_request("chat", ["--null_worker"])

    processes = {process.partition(".")[0]: names for process, names in files.items()}
    assert "httpserver/openai/stream.py" in processes["ls-httpserver"]
    assert "router/step_loop.py" in processes["ls-router"]
    assert "worker/null_worker.py" in processes["ls-worker"]
    assert "detokenization/req_text.py" in processes["ls-detokenizer"]
    assert not any(name.startswith("httpserver/ollama/") for name in processes["ls-httpserver"])
    assert FOLDER_VARIABLE not in os.environ


def test_a_file_of_two_processes_counts_once() -> None:
    lines = list(report({"a": {"errors.py", "__init__.py"}, "b": {"errors.py"}}))

    assert lines[0] == "a: 2"
    assert lines[-1].startswith("2 files, ")
