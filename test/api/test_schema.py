"""What /openapi.json promises, tried out by schemathesis: bodies that fit it and bodies that do not.

The same by hand with more of them, for example against ``--null_worker --max_req_total_len 256``:

    st run http://127.0.0.1:8000/openapi.json --mode all --phases coverage,fuzzing -n 500 -c ...
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from test.api.server import running_server

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
EXAMPLES = 10  # bodies made at random for each operation, besides some two thousand made by plan
DEADLINE_S = 300.0
# a body may ask for a deadline that has passed
CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "504"]
"""


@pytest.mark.slow
def test_every_operation_keeps_to_its_schema_whatever_it_is_sent(tmp_path: Path) -> None:
    options = ["--mode", "all", "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES), "--seed", "1"]
    options += ["--checks", ",".join(CHECKS), "--generation-allow-x00", "true", "--no-shrink", "--no-color"]
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    flags = ("--null_worker", "--disable_log_requests", "--max_req_total_len", "256")

    with running_server(tmp_path / "log", *flags) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *options]
        tried = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
        log = server.log

    assert tried.returncode == 0, tried.stdout[-5000:] + tried.stderr[-2000:]
    assert "Tested: " in tried.stdout
    assert "Traceback" not in log
