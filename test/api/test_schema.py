"""The promises of /openapi.json, tested by schemathesis with valid and invalid bodies.

Text may hold NUL. Halves of surrogate pairs, which JSON can say and Unicode cannot, are in test_faults.py: schemathesis
takes them with ``--generation-codec unicode_escape``, but its own validator fails at some.

    pytest --long --examples 500 test/api/test_schema.py

makes so many bodies at random for each operation, and sends all bodies made by plan: CI sends a sample of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from test.api.server import ServerProcess, running_server

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
EXAMPLES, EXAMPLES_LONG = 4, 100  # bodies at random for each operation, besides some thousands made by plan
DEADLINE_S, EXAMPLE_S = 900.0, 10.0  # of all operations; one more of each takes a tenth of a second on a free machine
SAMPLE = Path(__file__).with_name("planned_bodies.py")
# a body may ask for a deadline that has passed
CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "504"]
"""


# other paths of an operation; and operations that the second test sends to a model that has them
SAME = r"^/(v2/rerank|score)$"
POOLING = r"^/(v2/rerank|score|pooling|rerank|classify|predict|embed)$"
# operations that validate the body of another one: bodies made by plan are sent to that one; --long sends them to all
SAME_BODY = r"^/(v1/chat/completions/render|tokenize|chat_tokenize|v1/messages/count_tokens|generate_stream|)$"


@pytest.fixture
def hooks(request: pytest.FixtureRequest) -> str:
    """Those of schemathesis, as a line of its configuration."""
    return "" if request.config.getoption("--long") else f'hooks = "{SAMPLE}"\n'


@pytest.mark.slow
def test_every_operation_conforms_to_its_schema(tmp_path: Path, hooks: str) -> None:
    options = ("--mode", "all", "--seed", "1")

    with null_server(tmp_path) as server:
        conform(server, hooks, EXAMPLES, *options, "--exclude-path-regex", f"{POOLING}|{SAME_BODY}")
        conform(server, hooks, EXAMPLES, *options, "--include-path-regex", SAME_BODY, "--phases", "fuzzing")


@pytest.mark.slow
def test_every_pooling_operation_conforms_to_its_schema(tmp_path: Path, hooks: str) -> None:
    paths = "embed|rerank|score|classify|pooling|predict"
    options = ("--mode", "all", "--seed", "1", "--include-path-regex", paths, "--exclude-path-regex", SAME)

    with null_server(tmp_path, "--task", "embed") as server:
        conform(server, hooks, EXAMPLES, *options)


@pytest.mark.slow
def test_every_operation_of_trainers_conforms_to_its_schema(tmp_path: Path, hooks: str) -> None:
    """Without those that make others wait: a pause, and a sleep that stops the workers for each example."""
    paths = "inference|get_world_size|is_|(flush|prefix)_cache|abort_requests|resume$|continue_generation|^/generate$"
    options = ("--mode", "all", "--seed", "1", "--include-path-regex", paths)

    with null_server(tmp_path, "--enable_rl") as server:
        conform(server, hooks, EXAMPLES, *options)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_operations_conform_with_many_more_examples(tmp_path: Path, request: pytest.FixtureRequest, mode: str) -> None:
    examples = request.config.getoption("--examples") or EXAMPLES_LONG
    flags = ("--strict_fields",) if mode == "negative" else ()

    with null_server(tmp_path, *flags) as server:
        conform(server, "", examples, "--mode", mode)


@contextmanager
def null_server(folder: Path, *more: str) -> Iterator[ServerProcess]:
    flags = ["--null_worker", "--disable_log_requests", "--max_req_total_len", "256", "--default_max_tokens", "64"]
    flags += ["--profile_dir", str(folder / "p"), "--batch_dir", str(folder / "batches")]
    with running_server(folder / "log", *flags, *more) as server:
        yield server


def conform(server: ServerProcess, hooks: str, examples: int, *more: str) -> None:
    """``more`` options of schemathesis come last, so that they count."""
    folder = server.log_path.parent
    (folder / "schemathesis.toml").write_text(hooks + CONFIG)
    options = ["--phases", "coverage,fuzzing", "--max-examples", str(examples), "--checks", ",".join(CHECKS)]
    options += ["--generation-allow-x00", "true", "--no-shrink", "--no-color", *more]
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *options]
    deadline_s = DEADLINE_S + EXAMPLE_S * examples

    tried = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=deadline_s)

    print(tried.stdout[-2000:])  # how many there were, for pytest -s
    assert tried.returncode == 0, tried.stdout[-5000:] + tried.stderr[-2000:]
    assert "Tested: " in tried.stdout
    assert "Traceback" not in server.log
