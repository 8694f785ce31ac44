"""Every Triton kernel compiles for an H200, on a machine that has none."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from triton.runtime.jit import KernelInterface

from lightserve.common import triton_kernel

SHARED_BYTES = 227 * 1024  # of a thread block on sm_90


def kernels() -> Iterator[str]:
    for module_info in pkgutil.iter_modules(triton_kernel.__path__):
        module = importlib.import_module(f"{triton_kernel.__name__}.{module_info.name}")
        for name, value in vars(module).items():
            if isinstance(value, KernelInterface) and name.endswith("_kernel"):
                yield name


@pytest.fixture(scope="session")
def report() -> Any:
    """What ``compile_kernels`` prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "test.ops.compile_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sorted(kernels()))
def test_kernel_compiles_for_an_h200_and_fits_its_shared_memory(report: Any, kernel: str) -> None:
    assert kernel not in report["errors"], report["errors"][kernel]
    assert kernel in report["shared_bytes"], "no wrapper called by compile_kernels.py launches it"
    assert report["shared_bytes"][kernel].keys() == {"float32", "float16", "bfloat16"}
    assert max(report["shared_bytes"][kernel].values()) <= SHARED_BYTES
