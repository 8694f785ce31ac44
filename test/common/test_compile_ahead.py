from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightserve.common import ops
from lightserve.common.compile import client
from lightserve.common.compile.client import CompileServer, compilers_for, running_server
from lightserve.common.triton_kernel import place_tokens
from lightserve.utils import drivers
from test.waiting import wait_until


def compile_two_kernels(*args: str, **environment: str) -> Mapping[str, Any]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "test.common.compile_two_kernels", *args]

    done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    found: Mapping[str, Any] = json.loads(done.stdout) | {"stderr": done.stderr}
    return found


@pytest.mark.slow
def test_kernels_are_compiled_and_not_launched() -> None:
    found = compile_two_kernels()

    assert found["compiled"] == 2  # widths that are multiples of 16 share one
    assert found["zero"]
    assert found["entered"] >= 1
    assert found["stderr"].splitlines()[-1].startswith("kernels: 100 % of 2 in ")  # a slow machine shows 50 % too


@pytest.mark.slow
def test_the_compile_server_compiles_if_the_cache_is_empty(tmp_path: Path) -> None:
    found = compile_two_kernels(str(tmp_path / "line"), TRITON_CACHE_DIR=str(tmp_path / "cache"))

    assert found["compiled"] == 2
    assert found["compiled_here"] == 0
    assert found["left"] == []


@pytest.mark.slow
def test_a_worker_compiles_kernels_itself_if_the_server_fails(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'compile.server' in ' '.join(sys.orig_argv): sys.exit('no memory')\n"
    )

    found = compile_two_kernels(
        str(tmp_path / "line"), TRITON_CACHE_DIR=str(tmp_path / "cache"), PYTHONPATH=str(tmp_path)
    )

    assert found["compiled"] == 2
    assert found["compiled_here"] == 2


def test_no_compile_server_is_started_if_the_cache_has_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / f"{client.EVERY_STEP_KERNEL}.json").touch()

    with client.compile_server(str(tmp_path / "line")):
        assert running_server() is None


def test_the_kernel_that_marks_a_used_cache_is_launched_in_every_mode() -> None:
    assert hasattr(place_tokens, client.EVERY_STEP_KERNEL)
    assert ops.batch_invariant("triton") not in ops.place_tokens.impls


@pytest.mark.parametrize(
    ("device", "has_gpu", "has_triton", "starts"),
    [
        (None, True, True, True),
        ("cuda", True, True, True),
        ("cpu", True, True, False),
        (None, False, True, False),
        (None, True, False, False),
    ],
)
def test_a_worker_starts_a_compile_server_only_if_it_will_launch_kernels(
    device: str | None, has_gpu: bool, has_triton: bool, starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    control = tmp_path if has_gpu else tmp_path / "none"
    monkeypatch.setitem(drivers.DRIVERS, "cuda", drivers.DRIVERS["cuda"]._replace(control=control))
    monkeypatch.setattr(client, "find_spec", lambda name: has_triton or None)

    with compilers_for(device, str(tmp_path / "line")):
        assert (running_server() is not None) == starts
    assert running_server() is None


@pytest.mark.slow
def test_a_compile_server_ends_with_its_worker(tmp_path: Path) -> None:
    start = f"from {CompileServer.__module__} import CompileServer as K; k = K({str(tmp_path / 'line')!r});"
    ask = "print(k._process.pid, flush=True); k.compile('no:kernel', '{}', ['cuda', 90, 32], None); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", start + ask], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert Path(f"/proc/{pid}").exists()

    process.kill()
    process.communicate()

    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])
