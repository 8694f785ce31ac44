"""The device of docs/adding_a_device.md is whole, word for word; only what torch calls it differs here."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightserve.common import ops
from lightserve.common.device import base, registry
from lightserve.conformance import main

PAGE = Path(__file__).parent.parent.parent / "docs" / "adding_a_device.md"
# this machine has no such hardware
HERE = {'torch_type = "npu"': 'torch_type = "cpu"', 'comm_backend = "hccl"': 'comm_backend = "gloo"'}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """By pip, into a folder of its own."""
    device, kernels = blocks("python")[:2]
    for there, here in HERE.items():
        assert device.count(there) == 1
        device = device.replace(there, here)
    package, site = tmp_path / "source" / "lightserve_npu", tmp_path / "site"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(device)
    (package / "kernels.py").write_text(kernels)
    (package.parent / "pyproject.toml").write_text(blocks("toml")[0])
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(package.parent)], check=True
    )
    monkeypatch.syspath_prepend(site)
    driver = SimpleNamespace(
        is_available=lambda: True, set_device=lambda device: None, mem_get_info=lambda device: (10**9, 2 * 10**9)
    )
    monkeypatch.setattr(torch, "npu", driver, raising=False)
    monkeypatch.setattr(base, "_bound", None)
    registry._loaded.cache_clear()
    yield site
    registry._loaded.cache_clear()
    ops.rms_norm.impls.pop("npu", None)
    ops.use_backend(ops.REFERENCE)
    for name in [name for name in sys.modules if name.startswith("lightserve_npu")]:
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_the_first_device_of_the_page_passes_the_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--device", "npu", "--only", "ops", "device", "--ops", "rms_norm", "linear", "add_rms_norm"]) == 0

    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for expected in ("ok rms_norm native npu", "ok linear missing torch", "ok add_rms_norm composed torch"):
        assert any(line.startswith(expected) for line in shown)
    assert "ok copies beside the steps 24 blocks down and up" in shown
    assert "ok KV budget 0.8 GB, which can be allocated" in shown
    assert not any(line.startswith("!!") for line in shown)
