from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_kernels_are_compiled_and_not_launched() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "test.common.compile_two_kernels"]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["compiled"] == 2  # widths that are multiples of 16 share one
    assert found["zero"]
    assert found["entered"] >= 1
