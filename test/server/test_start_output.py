"""What people see while the server starts: in a terminal, and as JSON in a log."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lightserve.errors import LightserveError, ModelFilesError, UnsupportedModelTypeError, with_docs
from test.cli.terminal import CTRL_C, in_terminal
from test.server.launcher_process import PROGRAM, start_launcher, tiny_model, write_children

DOCS = Path(__file__).parent.parent.parent / "docs"
LOADING_WORKER = """
    def main(child_config, launcher):
        launcher.send(StartupProgress("import torch"))
        launcher.send(StartupProgress("weights", 5, 10, "items"))
        launcher.send(StartupProgress("weights", 10, 10, "items", 1.0, 2.0, "finished"))
        launcher.send(StartupProgress("CUDA graphs", 3, 3, "items", 1.0, 0.5, "finished"))
        figures = dict(max_total_token_num=4096, max_req_total_len=512, vocab_size=64, pipeline_depth=1)
        launcher.send(EngineInfo(**figures, dtype_and_device="in float16 on a fake"))
        signal.pause()
    run_child("model worker", main)
"""


def test_a_terminal_has_one_progress_line_that_the_banner_replaces(tmp_path: Path) -> None:
    write_children(tmp_path, worker=LOADING_WORKER)
    flags = ("--port=0", f"--model_dir={tiny_model(tmp_path)}", "--load_format=dummy")
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}

    with in_terminal(*flags, program=("-c", PROGRAM), env=env) as terminal:
        terminal.wait_for("import torch ...")
        during = terminal.wait_for("LightServe is ready at ")
        terminal.wait_for("http://")
        terminal.type(CTRL_C)
        assert terminal.wait_end() == 0

    assert "weights [##############################] 100 %" in during
    assert "CUDA graphs [##############################] 100 %" in during
    assert [line for line in during.split("\n")[:-1] if "[###" in line] == []  # no bar stays
    before_banner = terminal.raw.partition("LightServe is ready")[0]
    assert before_banner.endswith("\r\x1b[K\x1b[1m")


def test_a_log_has_a_plain_line_for_each_phase(tmp_path: Path) -> None:
    with start_launcher(tmp_path, worker=LOADING_WORKER) as server:
        server.wait_ready()

        text = server.stderr()
    assert "\nweights: 100 % of 10 in 2.0 s\nCUDA graphs: 100 % of 3 in 0.5 s\nLightServe is ready at " in text
    assert "\x1b" not in text


def test_with_json_every_line_of_the_start_is_an_object(tmp_path: Path) -> None:
    with start_launcher(tmp_path, "--log_format=json", "--host=0.0.0.0", worker=LOADING_WORKER) as server:
        server.wait_for_output("is ready at")
        server.wait_for_output("total")

        lines = [json.loads(line) for line in server.stderr().splitlines()]
    by_message = {line["message"].split(":")[0].split(" at ")[0]: line for line in lines}
    assert (by_message["weights"]["phase"], by_message["weights"]["total"]) == ("weights", 10)
    assert by_message["LightServe is ready"]["computed_as"] == "LlamaForCausalLM in float16 on a fake"
    assert any(line["level"] == "warning" for line in lines)  # anyone may use a server without a key
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)


def test_a_crash_is_one_object_with_its_traceback(tmp_path: Path) -> None:
    worker = """
        def main(child_config, launcher):
            raise ZeroDivisionError("by zero")
        run_child("model worker", main)
    """
    with start_launcher(tmp_path, "--log_format=json", worker=worker) as server:
        assert server.exit_code() == 1

        *_, crash, ended = (json.loads(line) for line in server.stderr().splitlines())
    assert "ZeroDivisionError: by zero" in crash["traceback"]
    assert ended["message"] == "model worker 0 died (exit code 1): ZeroDivisionError: by zero"


def subclasses(kind: type[LightserveError]) -> list[type[LightserveError]]:
    return [kind, *(one for below in kind.__subclasses__() for one in subclasses(below))]


@pytest.mark.parametrize("kind", [kind for kind in subclasses(LightserveError) if kind.docs])
def test_an_error_names_a_page_that_exists(kind: type[LightserveError]) -> None:
    assert (DOCS / str(kind.docs)).is_file()


def test_the_page_of_the_cause_is_more_precise() -> None:
    error = ModelFilesError("folder: model_type 'x' is not supported")
    error.__cause__ = UnsupportedModelTypeError("model_type 'x' is not supported")

    assert with_docs(error) == "folder: model_type 'x' is not supported (see docs/models.md)"
    assert with_docs(ValueError("no page")) == "no page"
